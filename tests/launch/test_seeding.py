"""`syncline.seed_everything`: equal set-up, a stream of its own for each worker, and none that comes twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from syncline import ConfigError, seed_everything

#: Two models, the second one made when the first is registered; data made after that. Then noise, step by step.
GAN = """
    import json, os, pathlib, random, sys, time
    import numpy as np, torch, syncline
    from syncline.torch import DataLoader, DistributedOptimizer
    syncline.seed_everything(5)
    settings = dict(max_steps=int(sys.argv[2]), checkpoint="saves") if "steps" in sys.argv else {}
    job = syncline.init(**settings)
    models, optimizers = [], []
    for sizes in ((2, 4), (4, 1)):
        models.append(torch.nn.Linear(*sizes))
        setup = float(models[-1].weight.detach().sum())
        optimizers.append(
            DistributedOptimizer(torch.optim.SGD(models[-1].parameters(), lr=0.01), model=models[-1])
        )
    data = torch.utils.data.TensorDataset(torch.randn(256 if "dies" in sys.argv else 64, 4))
    setup = [setup, float(data.tensors[0].sum()), random.random(), float(np.random.rand())]
    noise = []

    def step(x):
        z = torch.randn(8, 2)
        noise.append([float(z[0, 0]), random.random(), float(np.random.rand())])
        print("NOISE", json.dumps([job.name, job.own_step, noise[-1]]), flush=True)
        if "dies" in sys.argv and job.name == "worker-1":
            if os.path.exists("died"):
                pathlib.Path("back").touch()
            elif len(noise) == 3:
                pathlib.Path("died").touch()
                os._exit(1)
        while "dies" in sys.argv and job.name == "worker-0" and len(noise) == 5 and not os.path.exists("back"):
            time.sleep(0.02)  # some of the data are for its new life
        (models[1](x).mean() - models[1](models[0](z)).mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if "dies" in sys.argv and job.config.checkpoint and len(noise) == 1 and not os.path.exists("died"):
            print("SAVED", job.save(), flush=True)

    print("SETUP", json.dumps([job.name, setup]), flush=True)
    if "loader" in sys.argv:
        for (x,) in DataLoader(data, batch_size=8, shuffle=True):
            step(x)
    else:
        job.put_back()
        for _ in range(8):
            step(data.tensors[0][:8])
"""


def told(output: str, word: str) -> list[Any]:
    found = [line.partition(f"{word} ")[2] for line in output.splitlines() if f"{word} [" in line]
    return [json.loads(line) for line in found]


def noise_of(output: str, name: str) -> list[Any]:
    return [drawn for who, _, drawn in told(output, "NOISE") if who == name]


def run(commands: Any, *words: str) -> str:
    program = ("-m", "syncline") if words[0] == "run" else ()
    result = commands.finish(commands.start(*words, program=program))
    assert result.code == 0, result.output
    return str(result.output)


@pytest.mark.proof
def test_each_worker_has_its_own_stream_and_equal_runs_are_equal(commands: Any) -> None:
    script = commands.script(GAN)
    first, second = (run(commands, "run", "-w", "2", script, "loader") for _ in range(2))
    setups = [setup for _, setup in told(first, "SETUP")]
    assert len(setups) == 2 and setups[0] == setups[1], "models, data and splits are equal in all workers"
    ours, theirs = (noise_of(first, f"worker-{k}") for k in (0, 1))
    assert len(ours) == len(theirs) == 4
    flat = [number for drawn in (*ours, *theirs) for number in drawn]
    assert len(set(flat)) == len(flat), "nobody draws what another one draws"
    assert [noise_of(second, f"worker-{k}") for k in (0, 1)] == [ours, theirs]
    alone = run(commands, script, "loader")
    assert told(alone, "SETUP")[0] == ["worker-0", setups[0]]
    assert noise_of(alone, "worker-0")[:4] == ours


@pytest.mark.proof
def test_without_a_loader_of_ours_streams_part_with_the_first_step(commands: Any) -> None:
    """What is drawn before it belongs to the set-up: it is equal in all workers."""
    output = run(commands, "run", "-w", "2", commands.script(GAN))
    ours, theirs = (noise_of(output, f"worker-{k}") for k in (0, 1))
    assert len(ours) == len(theirs) == 8 and ours[0] == theirs[0]
    assert all(one[k] != two[k] for one, two in zip(ours[1:], theirs[1:], strict=True) for k in range(3))


@pytest.mark.proof
@pytest.mark.parametrize("saves", [[], ["--checkpoint", "saves"]], ids=["", "saved"])
def test_a_worker_that_starts_again_does_not_repeat_its_stream(commands: Any, saves: list[str]) -> None:
    """Nor what it drew after the save that its new life begins with."""
    output = run(commands, "run", "-w", "2", *saves, commands.script(GAN), "loader", "dies")
    assert output.count("SAVED 000001-step-1") == (2 if saves else 0), output
    drawn = noise_of(output, "worker-1")
    assert (commands.folder / "back").exists() and len(drawn) > 3, output
    flat = [number for each in drawn for number in each]
    assert len(set(flat)) == len(flat), drawn


@pytest.mark.proof
def test_a_job_that_is_taken_up_goes_on_with_its_streams(commands: Any) -> None:
    script = commands.script(GAN)
    parts = [noise_of(run(commands, script, "steps", steps), "worker-0") for steps in ("3", "6")]
    (commands.folder / "saves").rename(commands.folder / "others")
    whole = noise_of(run(commands, script, "steps", "6"), "worker-0")
    # Each run has drawn for one step more than it made: the one that was ended.
    assert parts[0][:3] + parts[1] == whole


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5, "x", None])
def test_a_seed_is_an_int(seed: Any) -> None:
    with pytest.raises(ConfigError, match="the seed must be"):
        seed_everything(seed)
