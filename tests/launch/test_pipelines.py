"""Pipelines of real processes: the same numbers as one process, deaths, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from tests.launch.pipelines import pipeline_of, trains_as_one_process_does
from tests.patience import PATIENCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "stages", "schedule", "model", "dtype", "optimizer"),
    [
        (2, 2, "gpipe", "lenet", "float64", "Adam"),
        (4, 2, "1f1b", "tied", "float32", "SGD"),
    ],
)
def test_it_trains_as_one_process_does(
    commands: Any, workers: int, stages: int, schedule: str, model: str, dtype: str, optimizer: str
) -> None:
    """The same batches, cut into the same micro-batches: parameters differ by rounding only."""
    trains_as_one_process_does(commands, workers, stages, schedule, model, dtype, optimizer)


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
    leader, stage = pipeline_of(commands.folder, "worker-0")
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


UNEVEN = """
    import os, sys, time, torch, syncline
    from torch import nn
    from syncline.core.pipelining import replanning
    from syncline.torch import DistributedOptimizer, Pipeline

    replanning.MEASURE_SECONDS = 1.0
    job = syncline.init()
    is_leader = type(job).__name__ == "Job"

    class Layer(nn.Linear):  # the first is slow, and all are slower in the stage process than in the leader
        def __init__(self, seconds):
            super().__init__(4, 4, dtype=torch.float64)
            self.seconds = seconds
        def forward(self, x):
            time.sleep(self.seconds * (1 if is_leader else 4))
            return torch.tanh(super().forward(x))

    torch.manual_seed(0)
    pipe = Pipeline(nn.Sequential(*(Layer(s) for s in (0.15, 0.05, 0.05, 0.05))), nn.functional.mse_loss)
    opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9), model=pipe)
    begun = [stage.parameter_bytes for stage in pipe.stats()]
    torch.manual_seed(1)
    for step in range(9):
        pipe.step(torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64))
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)
        print("layers", [stage.layers for stage in pipe.stats()], flush=True)
    spans = pipe.timeline()
    assert len(spans) == 2 * 4 * 2 and all(0 <= span.begin < span.end for span in spans), spans
    assert {(span.stage, span.kind) for span in spans} == {(s, k) for s in (0, 1) for k in "FB"}
    opt.pull()
    torch.save({"state": pipe.state_dict(), "begun": begun}, sys.argv[1])
"""


@pytest.mark.slow
def test_a_job_follows_the_plan_and_is_cut_elsewhere_when_a_stage_is_slow(commands: Any) -> None:
    """Equal layers by parameters are cut in the middle. Measured, the first one is worth three. While the job runs,
    the second process turns out to be slow. Parameters and momentum stay those of one process.
    """
    script = commands.script(UNEVEN)
    result = commands.run("run", "-w", "2", "--stages", "2", "--micro-batches", "4", script, "out.pt")
    assert result.code == 0, result.output
    assert "the pipeline of worker-0, in 2 parts: cut before stages[1] (1 + 3 of 4 layers)" in result.output
    assert "layers ['stages[0]', 'stages[1] … stages[3]']" in result.output
    assert "process 1 computed at" in result.output and "another cut would gain" in result.output, result.output
    assert "layers ['stages[0] … stages[2]', 'stages[3]']" in result.output, result.output
    found = torch.load(commands.folder / "out.pt", weights_only=True)
    assert found["begun"] == [320, 320]
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)]
    whole = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.Tanh())))
    opt = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    for _ in range(9):
        x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
        opt.zero_grad()
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            (torch.nn.functional.mse_loss(whole(a), b) / 4).backward()
        opt.step()
    for number, layer in enumerate(layers):
        assert torch.allclose(found["state"][f"{number}.weight"], layer.weight, rtol=0, atol=1e-12)


WAITING = """
    import pathlib, time, torch, syncline
    from torch import nn
    from syncline.torch import DistributedOptimizer, Pipeline

    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(0.05)
            while pathlib.Path("hold").exists():
                time.sleep(0.05)
            return super().forward(x)

    job = syncline.init()
    pipe = Pipeline(stages=[nn.Linear(4, 4), Slow(4, 4)], loss_fn=nn.functional.mse_loss)
    opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
    while not pathlib.Path("enough").exists():
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))
        opt.step(); opt.zero_grad()
        print("step", flush=True)
"""


@pytest.mark.slow
def test_status_and_why_speak_of_stages(commands: Any) -> None:
    """The second stage computes nearly all of a step; then it hangs in a forward; then it is stopped."""
    script = commands.script(WAITING)
    process = commands.start("run", "--name", "it", "-w", "2", "--stages", "2", "--profile", script)
    commands.wait_for("step\nstep\nstep\n", "worker-0")

    def until(command: str, words: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while words not in (said := commands.run(command, "it").output):
            assert time.monotonic() < deadline, said
        return said

    said = until("status", "stage 0 waits for stage 1")
    assert "ms in its stages for a step, bubble" in said and "stage 1 computes" in said, said
    assert "to other stages 128 B a step" in said, said  # 8 samples of 4 floats, and as many gradients
    _, stage = pipeline_of(commands.folder, "worker-0")
    (commands.folder / "hold").touch()
    until("why", "the pipeline of worker-0 has waited")
    until("why", f"stage 1 (process {stage}, computing)")
    os.kill(stage, signal.SIGSTOP)
    until("why", f"stage 1 (process {stage}, silent for ")
    os.kill(stage, signal.SIGCONT)
    (commands.folder / "enough").touch()
    (commands.folder / "hold").unlink()
    result = commands.finish(process)
    assert result.code == 0, result.output
    assert "profile: worker-0: " in result.output and "profile:   stage 1 computes " in result.output, result.output


@pytest.mark.slow
@pytest.mark.proof
def test_micro_batches_are_planned_before_the_job_starts(commands: Any) -> None:
    """All pipelines and all restarts have the same number: BatchNorm and rounding depend on it."""
    script = commands.script(
        """
        import torch, syncline
        from torch import nn
        from syncline.torch import DistributedOptimizer, Pipeline
        job = syncline.init()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        pipe = Pipeline(model, nn.functional.mse_loss, example=torch.zeros(1, 8))
        opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
        print("micro-batches", job.config.stages, job.config.micro_batches, flush=True)
        for step in range(2):
            pipe.step(torch.randn(16, 8), torch.randn(16, 8))
            opt.step(); opt.zero_grad()
        """
    )
    result = commands.run("run", "-w", "2", "--stages", "2", "--micro-batches", "auto", script)
    assert result.code == 0, result.output
    found = re.search(
        r"syncline: planned: pipelines of 2 stages, (\d+) micro-batch(es)? each: cut before ", result.output
    )
    assert found is not None, result.output
    assert f"micro-batches 2 {found[1]}\n" in result.output
    assert "the pipeline of worker-0, in 2 parts: cut before" in result.output


@pytest.mark.slow
@pytest.mark.proof
def test_as_many_stages_as_train_most(commands: Any) -> None:
    """A model that fits is replicated: replicas have no bubble."""
    script = commands.script(
        """
        import torch, syncline
        from torch import nn
        from syncline.torch import DistributedOptimizer, Pipeline
        job = syncline.init()
        pipe = Pipeline(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.functional.mse_loss)
        opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
        pipe.step(torch.randn(16, 8), torch.randn(16, 8))
        opt.step()
        print(job.name, "of", job.world_size, "in stages:", job.config.stages, flush=True)
        """
    )
    result = commands.run("run", "-w", "4", "--stages", "auto", "--micro-batches", "auto", script)
    assert result.code == 0 and "worker-0 of 4 in stages: 1" in result.output, result.output
    refused = commands.run("run", "--stages", "auto", script)
    assert refused.code != 0 and "--stages auto: say how many processes there are" in refused.output
    refused = commands.run("run", "-w", "2", "--stages", "two", script)
    assert refused.code != 0 and "--stages 'two': must be a number, or auto" in refused.output


#: What a script does, and what it is told. Each is an error at the start, and nothing hangs.
WRONG = {
    "no example": ("Pipeline(Net(), loss)", "give an example of its inputs with Pipeline(model, loss_fn, example="),
    "not traced": (
        "Pipeline(Branching(), loss, example=torch.zeros(8, 4))",
        r"Branching cannot be traced: train.py, line \d+ \(if x.sum\(\) > 0:.*stages=\[front, back\].*cut_before=",
    ),
    "few layers": ("Pipeline(nn.Sequential(nn.Linear(4, 4)), loss)", "2 parts need as many layers"),
    "small batch": ("train(Pipeline(two(), loss), 3)", "a batch of 3 samples cannot be cut into 4 micro-batches"),
    "dynamic": ("train(Pipeline(stages=[Dynamic(), nn.Linear(4, 4)], loss_fn=loss))", "must have one shape"),
    "sum": ("train(Pipeline(two(), nn.MSELoss(reduction='sum')))", "loss_fn must be the mean over samples"),
    "many": ("train(Pipeline(two(), nn.MSELoss(reduction='none')))", "it must return one number, the mean"),
    "in place": (
        "train(Pipeline(stages=[nn.Linear(4, 4), Editing(4, 4)], loss_fn=loss))",
        r"\(Editing\) edits in place what the stage before it gives",
    ),
    "other models": (
        "train(Pipeline(nn.Sequential(nn.Linear(4, 4 if leads else 5), nn.Linear(4 if leads else 5, 4)), loss))",
        "has made another model than the first one of its pipeline",
    ),
    "wrong name": (
        "Pipeline(two(), loss, example=torch.zeros(8, 4), cut_before=['blocks.6'])",
        "the model has no module 'blocks.6'",
    ),
    "wrong count": (
        "Pipeline(two(), loss, example=torch.zeros(8, 4), cut_before=['1', '2'])",
        "cut_before names 2 of the 1 cuts that make 2 parts",
    ),
    "no cut": ("Pipeline(two(), loss, cut_before=['1'])", r"cut_before needs example=\(x,\)"),
}


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_a_pipeline_is_said_at_the_start(commands: Any, what: str) -> None:
    call, words = WRONG[what]
    script = commands.script(
        f"""
        import torch, syncline
        from torch import nn
        from syncline.torch import DistributedOptimizer, Pipeline

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            def forward(self, x):
                return self.two(self.one(x))

        class Branching(Net):
            def forward(self, x):
                if x.sum() > 0:
                    return self.two(x)
                return self.two(self.one(x))

        class Dynamic(nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
            def forward(self, x):
                return super().forward(x)[x[:, 0] >= 0]

        class Editing(nn.Linear):
            def forward(self, x):
                x += 1.0
                return super().forward(x)

        def two():
            return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

        def train(pipe, size=8):
            opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
            torch.manual_seed(0)
            pipe.step(torch.randn(size, 4), torch.randn(size, 4))
            opt.step()
            print("it trained")

        loss = nn.functional.mse_loss
        job = syncline.init()
        leads = type(job).__name__ == "Job"
        {call}
        """
    )
    result = commands.run("run", "-w", "2", "--stages", "2", "--micro-batches", "4", "--max-restarts", "0", script)
    assert result.code != 0 and "it trained" not in result.output, result.output
    assert re.search(words, result.output.replace("\n", " ")), result.output
