"""Pipelines of real processes: the same numbers as one process, deaths, and what is refused."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest
import torch
from tests.launch.pipeline_train import make_stages, train_plainly

SCRIPT = str(pathlib.Path(__file__).with_name("pipeline_train.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "stages", "schedule", "model", "dtype", "optimizer"),
    [
        (2, 2, "gpipe", "plain", "float64", "adam"),
        (4, 2, "1f1b", "tied", "float32", "sgd"),
        pytest.param(2, 2, "1f1b", "norm", "float32", "sgd", marks=pytest.mark.proof),
        pytest.param(4, 4, "1f1b", "tied", "float64", "adam", marks=pytest.mark.proof),
        pytest.param(2, 2, "interleaved", "norm", "float64", "sgd", marks=pytest.mark.proof),
    ],
)
def test_it_trains_as_one_process_does(
    commands: Any, workers: int, stages: int, schedule: str, model: str, dtype: str, optimizer: str
) -> None:
    """The same batches, cut into the same micro-batches: parameters differ by rounding only."""
    num_steps, num_micro = 20, 6
    result = commands.run(
        "run", "-w", str(workers), "--stages", str(stages), "--schedule", schedule, "--micro-batches", str(num_micro),
        SCRIPT, "out.pt", model, dtype, optimizer, str(num_steps),
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("the script of worker-0") == 1, result.output
    found = torch.load(commands.folder / "out.pt", weights_only=True)
    kind = getattr(torch, dtype)
    wanted = train_plainly(model, kind, optimizer, num_steps, workers // stages, num_micro)
    first = dict(torch.nn.Sequential(*make_stages(model, kind)).named_parameters())
    assert found["state"].keys() == wanted.keys()
    limit = 1e-10 if dtype == "float64" else 1e-5
    for name, value in wanted.items():
        assert torch.allclose(found["state"][name], value, rtol=limit, atol=limit), name
    assert all(not torch.equal(found["state"][name], value) for name, value in first.items())
    assert found["output"].dtype == kind and found["output"].shape[0] == 24


KILLED = """
    import os, pathlib, signal, sys, time, torch, syncline
    from torch import nn
    from syncline.torch import DataLoader, DistributedOptimizer, Pipeline

    class Whole(nn.Module):  # gradients are whole numbers: sums of them have no order
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(width))
        def forward(self, x):
            pause()
            return x + self.weight

    def pause():
        time.sleep(0.02)

    def loss_fn(output, target):
        return (output * target).sum(1).mean()

    job = syncline.init()
    pipe = Pipeline(stages=[Whole(4), Whole(4)], loss_fn=loss_fn)
    opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.5), model=pipe)
    numbers = torch.arange(512.0)
    samples = torch.utils.data.TensorDataset(torch.zeros(512, 4), numbers[:, None].expand(512, 4) * 4)
    for epoch in range(2):
        for x, y in DataLoader(samples, batch_size=8, shuffle=True, seed=3, name=f"epoch {epoch}"):
            pipe.step(x, y)
            opt.step(); opt.zero_grad()
            print("step", flush=True)
    opt.pull()
    torch.save(pipe.state_dict(), sys.argv[1])
"""


def processes_of(pid: int) -> list[int]:
    """The children of a process."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


def pipeline_of(pids: list[int]) -> tuple[int, int]:
    """The leader and the stage process, of two that have the same command line."""
    return next((pid, processes_of(pid)[0]) for pid in pids if processes_of(pid))


def members_named(folder: pathlib.Path, name: str) -> list[int]:
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and pathlib.Path(os.readlink(entry / "cwd")) == folder:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                found += [int(entry.name)] * (name in words)
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "how"),
    [
        pytest.param("leader", "SIGKILL", marks=pytest.mark.proof),
        ("stage", "SIGKILL"),
        pytest.param("stage", "SIGSTOP", marks=pytest.mark.proof),
    ],
)
def test_a_pipeline_survives_the_death_of_any_of_its_processes(commands: Any, who: str, how: str) -> None:
    """Every sample counts once, so the parameters are what they are without a death: lr times the sum of all."""
    (commands.folder / "syncline.toml").write_text("start_seconds = 300.0\nlongest_deadline_seconds = 15.0\n")
    process = commands.start("run", "-w", "2", "--stages", "2", commands.script(KILLED), "out.pt")
    log = commands.wait_for("step\nstep\nstep\n", "worker-0")
    leader, stage = pipeline_of(members_named(commands.folder, "worker-0"))
    os.kill(leader if who == "leader" else stage, signal.Signals[how])
    result = commands.finish(process)
    assert result.code == 0, result.output
    assert "--- worker-0 starts again" in (commands.wait_for("starts again", "worker-0")), log
    if who == "stage":
        assert f"stage 1 (process {stage})" in result.output and "the pipeline ends and starts again" in result.output
    found = torch.load(commands.folder / "out.pt", weights_only=True)
    # The mean over a batch of 8 of 4 times the sample's number; each of 512 samples twice.
    wanted = -0.5 * 2 * 4 * sum(range(512)) / 8
    for value in found.values():
        assert value.tolist() == [wanted] * 4


@pytest.mark.slow
def test_scripts_that_cannot_be_a_pipeline_are_refused(commands: Any) -> None:
    plain = commands.script(
        """
        import torch, syncline
        from syncline.torch import DistributedOptimizer
        job = syncline.init()
        model = torch.nn.Linear(2, 2)
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        """
    )
    result = commands.run("run", "-w", "2", "--stages", "2", "--max-restarts", "0", plain)
    assert result.code != 0 and "this script trains a model that is no Pipeline" in result.output, result.output
    few = commands.script(
        """
        import torch, syncline
        from syncline.torch import Pipeline
        job = syncline.init()
        Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.functional.mse_loss)
        """
    )
    result = commands.run("run", "-w", "2", "--stages", "2", "--max-restarts", "0", few)
    assert result.code != 0 and "2 parts need as many layers, and the model has 1" in result.output, result.output


@pytest.mark.slow
def test_an_exception_in_a_stage_is_the_scripts(commands: Any) -> None:
    script = commands.script(
        """
        import torch, syncline
        from torch import nn
        from syncline.torch import DistributedOptimizer, Pipeline

        class Wrong(nn.Linear):
            def forward(self, x):
                if x.abs().sum() > 1e6:
                    raise ValueError("too much")
                return super().forward(x)

        job = syncline.init()
        pipe = Pipeline(stages=[nn.Linear(2, 2), Wrong(2, 2)], loss_fn=nn.functional.mse_loss)
        DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
        try:
            pipe.step(torch.full((8, 2), 1e9), torch.zeros(8, 2))
        except ValueError:
            print("in one process")
        except RuntimeError as error:
            print("caught", "stage 1 of worker-0" in str(error), "too much" in str(error))
        """
    )
    result = commands.run("run", "-w", "2", "--stages", "2", "--max-restarts", "0", script)
    assert "caught True True" in result.output, result.output


@pytest.mark.slow
def test_a_checkpoint_of_two_stages_is_taken_up_by_one(commands: Any) -> None:
    """Checkpoints know names, not stages."""
    text = """
        import sys, torch, syncline
        from torch import nn
        from syncline.torch import DistributedOptimizer, Pipeline, deferred_init
        job = syncline.init()
        torch.manual_seed(4)
        with deferred_init():
            layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)]
        pipe = Pipeline(stages=layers, loss_fn=nn.functional.mse_loss)
        assert pipe.state_dict().keys() == {
            "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
            "2.weight", "2.bias",
        }
        if sys.argv[1] == "first":
            torch.manual_seed(4)
            same = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).state_dict()
            assert all(torch.equal(value, same[name]) for name, value in pipe.state_dict().items())
        opt = DistributedOptimizer(torch.optim.Adam(pipe.parameters(), lr=0.1), model=pipe)
        for step in job.steps(9):
            pipe.step(torch.ones(8, 6) * step, torch.ones(8, 2))
            opt.step(); opt.zero_grad()
        opt.pull()
        print("weights", job.step, float(sum(p.detach().double().sum() for p in pipe.parameters())))
    """
    script = commands.script(text)
    options = ("--checkpoint", "saved", "--micro-batches", "2")
    first = commands.run("run", "-w", "2", "--stages", "2", "--max-steps", "5", *options, script, "first")
    assert first.code == 0 and "weights 5" in first.output, first.output
    second = commands.run("run", "-w", "1", *options, script, "second")
    assert second.code == 0 and "weights 9" in second.output, second.output
    whole = commands.run("run", "-w", "1", "--micro-batches", "2", script, "first")
    weights = [float(result.output.partition("weights 9 ")[2].split()[0]) for result in (second, whole)]
    assert abs(weights[0] - weights[1]) < 1e-4, (second.output, whole.output)
