"""Pipelines in a process group that the script has made itself, before them."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from tests.launch.pipelines import IntegerJob, pipeline_of

GROUPED = """
    import os, sys, torch, syncline
    from torch import distributed as dist, nn
    from syncline.torch import DistributedOptimizer, Pipeline

    job = syncline.init()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    {call}
    torch.manual_seed(3)
    layers = [nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 2, dtype=torch.float64)]
    pipe = Pipeline(stages=layers, loss_fn=nn.functional.mse_loss)
    opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
    for step in range(3):
        x = torch.arange(32, dtype=torch.float64).reshape(8, 4) / 32 + step
        pipe.step(x, x[:, :2])
        opt.step(); opt.zero_grad()
    output = pipe.evaluate(x)
    print(job.name, "rank", dist.get_rank(), "of", dist.get_world_size(), dist.get_backend(), flush=True)
    if job.is_chief:
        torch.save([pipe.state_dict(), output], sys.argv[1])
"""


def _one_process() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8, dtype=torch.float64), torch.nn.Linear(8, 2, dtype=torch.float64)
    )
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.arange(32, dtype=torch.float64).reshape(8, 4) / 32 + step
        opt.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :2]).backward()
        opt.step()
    return model.state_dict(), model(x).detach()


@pytest.mark.slow
@pytest.mark.proof
def test_pipelines_take_their_parts_of_the_scripts_process_group(commands: Any) -> None:
    """It has all processes of the job, as torchrun's variables count them. Steps and evaluation are those of one
    process, and the script's group stays what it was.
    """
    script = commands.script(GROUPED.format(call='dist.init_process_group("gloo")'))
    result = commands.run("run", "-w", "4", "--stages", "2", "--env", "torchrun", script, "out.pt")
    assert result.code == 0, result.output
    assert "worker-0 rank 0 of 4 gloo" in result.output and "worker-1 rank 2 of 4 gloo" in result.output, (
        result.output
    )
    state, output = torch.load(commands.folder / "out.pt", weights_only=True)
    wanted, wanted_output = _one_process()
    for found, value in zip(state.values(), wanted.values(), strict=True):
        assert torch.allclose(found, value, rtol=0, atol=1e-12)
    assert torch.allclose(output, wanted_output, rtol=0, atol=1e-12)


#: What the script calls, and what it is told at the start.
WRONG = {
    "some": ('if not rank: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)',
             "in some processes of this pipeline, but not in stage 1"),
    "alone": ('dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)',
              "must be different ranks in the order of the stages (stage 0: rank 0 of 1, stage 1: rank 0 of 1)"),
    "turned": ('dist.init_process_group("gloo", rank=1 - rank, world_size=2)',
               "must be different ranks in the order of the stages (stage 0: rank 1 of 2, stage 1: rank 0 of 2)"),
    "strangers": ('dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=2)',
                  "its processes do not find each other by the process group that the script has made"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("what", WRONG)
def test_a_group_without_the_processes_of_the_pipeline_is_refused(commands: Any, what: str) -> None:
    call, words = WRONG[what]
    (commands.folder / "syncline.toml").write_text("wait_seconds = 5.0\n")
    script = commands.script(GROUPED.format(call=call))
    result = commands.run(
        "run", "-w", "2", "--stages", "2", "--env", "torchrun", "--max-restarts", "0", script, "out.pt"
    )
    assert result.code != 0 and words in result.output.replace("\n", " "), result.output


@pytest.mark.slow
@pytest.mark.proof
def test_a_pipeline_that_starts_again_makes_its_group_again(commands: Any) -> None:
    """A script of one pipeline, whose group has the pipeline's processes only."""
    job = IntegerJob(commands, 1, 2, 256, 1, "--env", "torchrun", makes_group=True)
    job.wait_for_steps(3)
    _, stage = pipeline_of(commands.folder, "worker-0")
    os.kill(stage, signal.SIGKILL)
    job.check()
    assert "--- worker-0 starts again" in commands.wait_for("starts again", "worker-0")
