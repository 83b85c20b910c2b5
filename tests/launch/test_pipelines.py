"""Pipelines of real processes: the same numbers as one process, deaths, and what is refused."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import time
from typing import Any

import pytest
import torch
from tests.launch.pipelines import (
    UNEVEN,
    IntegerJob,
    assert_traced,
    assert_trained_unevenly,
    pipeline_of,
    trains_as_one_process_does,
    trains_in_this_way,
)
from tests.patience import PATIENCE


@pytest.mark.slow
def test_it_trains_as_one_process_does(commands: Any) -> None:
    """Two pipelines of two stages with tied weights: parameters differ from those of one process by rounding only.

    Nobody edits gradients, and nobody is told so.
    """
    trains_as_one_process_does(commands, 4, 2, "1f1b", "tied", "float32", "SGD")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["clip_norm", "accumulation"])
def test_what_scripts_do_besides_works_as_in_one_process(commands: Any, way: str) -> None:
    """`clip_norm` is of the whole model, not of a stage. The other ways are in the proof."""
    trains_in_this_way(commands, way)


@pytest.mark.slow
def test_tied_weights_of_stages_count_once_in_async(commands: Any) -> None:
    """A pipeline is one worker: the gradients of its stages are summed before one commit, so nothing is refused."""
    IntegerJob(commands, pipelines=2, stages=2, num_samples=256, num_epochs=1, is_tied=True).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "how"),
    [
        pytest.param("leader", "SIGKILL", marks=pytest.mark.proof),
        ("stage", "SIGKILL"),
        pytest.param("leader", "SIGSTOP", marks=pytest.mark.proof),
        pytest.param("stage", "SIGSTOP", marks=pytest.mark.proof),
    ],
)
def test_a_pipeline_survives_the_death_of_any_of_its_processes(commands: Any, who: str, how: str) -> None:
    """Every sample counts once, so the parameters are those of a run without a death, bit by bit."""
    job = IntegerJob(commands, pipelines=1, stages=2, num_samples=256, num_epochs=1)
    job.wait_for_steps(3)
    leader, stage = pipeline_of(commands.folder, "worker-0")
    os.kill(leader if who == "leader" else stage, signal.Signals[how])
    output = job.check()
    if who == "stage":
        assert f"stage 1 (process {stage})" in output and "the pipeline ends and starts again" in output, output
    assert "--- worker-0 starts again" in commands.wait_for("starts again", "worker-0")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_an_exception_in_a_stage_is_the_scripts(commands: Any, stage: int) -> None:
    """It comes at once, whatever its words are. Other processes wait in the middle of that batch, so the next one is
    refused. Before, the script gives a model that is no Pipeline.
    """
    script = commands.script(
        f"""
        import torch, syncline
        from torch import nn
        from syncline.errors import ConnectionLost
        from syncline.torch import DistributedOptimizer, Pipeline
        from syncline.torch.pipelining import serving
        from syncline.worker import stages

        serving._LAST_SECONDS = stages._VERDICT_SECONDS = 1e6  # nothing waits for a verdict of others

        class Wrong(nn.Linear):
            def forward(self, x):
                if x.abs().sum() > 1e6:
                    raise RuntimeError("too much: gloo")
                return super().forward(x)

        job = syncline.init()
        if job.is_chief:  # the leader
            plain = nn.Linear(2, 2)
            try:
                DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1), model=plain)
            except syncline.ConfigError as error:
                print("refused", "this script trains a model that is no Pipeline" in str(error))
        kinds = [nn.Linear, nn.Linear]
        kinds[{stage}] = Wrong
        pipe = Pipeline(stages=[kind(2, 2) for kind in kinds], loss_fn=nn.functional.mse_loss)
        DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
        try:
            pipe.step(torch.full((8, 2), 1e9), torch.zeros(8, 2))
        except RuntimeError as error:
            print("caught", "stage 1 of worker-0" in str(error), "too much" in str(error))
        small = torch.zeros(8, 2)
        for again in (lambda: pipe.step(small, small), lambda: pipe.evaluate(small)):
            try:
                again()
            except ConnectionLost as error:
                print("then", "an earlier batch failed (RuntimeError: " in str(error) and "too much" in str(error))
        """
    )
    result = commands.run("run", "-w", "2", "--stages", "2", "--max-restarts", "0", script)
    assert "refused True" in result.output and f"caught {stage == 1} True" in result.output, result.output
    assert result.output.count("then True") == 2, result.output


RESUMED = """
    import sys, torch, syncline
    from torch import nn
    from syncline.torch import DistributedOptimizer, Pipeline, deferred_init

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.front = nn.Linear(6, 6, bias=False, dtype=torch.float64)  # else Adam makes steps of noise
            self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
            self.back = nn.Linear(6, 2, dtype=torch.float64)
        def forward(self, x):
            return self.back(torch.relu(self.norm(self.front(x.reshape(x.shape[0], -1)))))

    def batch(step):
        noise = torch.Generator().manual_seed(step)
        return tuple(torch.randn(8, *shape, generator=noise, dtype=torch.float64) for shape in ((2, 3), (2,)))

    def main(path):
        job = syncline.init()
        torch.manual_seed(4)
        with deferred_init():
            net = Net()
        pipe = Pipeline(net, nn.functional.mse_loss, example=(torch.zeros(4, 2, 3, dtype=torch.float64),))
        opt = DistributedOptimizer(torch.optim.Adam(pipe.parameters(), lr=0.1), model=pipe)
        begun = {name: value.clone() for name, value in pipe.state_dict().items()}
        for step in job.steps(9):
            pipe.step(*batch(step))
            opt.step(); opt.zero_grad()
        opt.pull()
        if job.is_chief:
            torch.save({"begun": begun, "state": pipe.state_dict(), "step": job.step}, path)

    if __name__ == "__main__":
        main(sys.argv[1])
"""


TWO, THREE, FOUR = ("-w", "2", "--stages", "2"), ("-w", "3", "--stages", "3"), ("-w", "4", "--stages", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TWO, ("-w", "1")),
        pytest.param(("-w", "1"), TWO, marks=pytest.mark.proof),
        pytest.param(TWO, THREE, marks=pytest.mark.proof),
        pytest.param(TWO, FOUR, marks=pytest.mark.proof),
        pytest.param(FOUR, ("-w", "2"), marks=pytest.mark.proof),
    ],
    ids=" ".join,
)
def test_a_checkpoint_is_taken_up_by_another_number_of_stages(
    commands: Any, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """Checkpoints know names, not stages, and pipelines are workers. Deferred values are those of one process, bit by
    bit. Two pipelines train on equal batches, so their mean is what one makes.
    """
    script = commands.script(RESUMED)
    options = ("--checkpoint", "saved", "--micro-batches", "2")
    first = commands.run("run", *before, "--max-steps", "5", *options, script, "first.pt")
    assert first.code == 0, first.output
    second = commands.run("run", *after, *options, script, "second.pt")
    assert second.code == 0, second.output
    five, nine = (torch.load(commands.folder / name, weights_only=True) for name in ("first.pt", "second.pt"))
    assert (five["step"], nine["step"]) == (5, 9)
    own = runpy.run_path(str(commands.folder / script))
    torch.manual_seed(4)
    net = own["Net"]()
    for name, value in net.state_dict().items():
        assert torch.equal(five["begun"][name], value), name
    opt = torch.optim.Adam(net.parameters(), lr=0.1)
    for step in range(9):
        if step == 5:
            assert_same_state(five["state"], net)
        x, y = own["batch"](step)
        opt.zero_grad()
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (torch.nn.functional.mse_loss(net(a), b) / 2).backward()
        opt.step()
    assert_same_state(nine["state"], net)


DROPPING = """
    import sys, torch, syncline
    from torch import nn
    from syncline.torch import DistributedOptimizer, Pipeline

    job = syncline.init()
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in range(2)]
    pipe = Pipeline(stages=layers, loss_fn=nn.functional.mse_loss)
    opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), model=pipe)
    for step in job.steps(8):
        pipe.step(torch.ones(8, 8), torch.zeros(8, 8))
        opt.step(); opt.zero_grad()
    opt.pull()
    torch.save(pipe.state_dict(), sys.argv[1])
"""


@pytest.mark.slow
def test_a_job_that_resumes_draws_the_masks_of_one_that_did_not_stop(commands: Any) -> None:
    """In all stages: the later ones drew the masks of their first steps again."""
    script = commands.script(DROPPING)
    for path, options in (
        ("whole.pt", ("--checkpoint", "one")),
        ("begun.pt", ("--checkpoint", "two", "--max-steps", "4")),
        ("ended.pt", ("--checkpoint", "two")),
    ):
        result = commands.run("run", *TWO, "--micro-batches", "2", *options, script, path)
        assert result.code == 0, result.output
    whole, begun, ended = (
        torch.load(commands.folder / path, weights_only=True) for path in ("whole.pt", "begun.pt", "ended.pt")
    )
    for name, value in whole.items():
        assert torch.equal(ended[name], value) and not torch.equal(begun[name], value), name


def assert_same_state(found: dict[str, torch.Tensor], net: torch.nn.Module) -> None:
    wanted = net.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-10), name


@pytest.mark.slow
def test_a_job_follows_the_plan_and_is_cut_elsewhere_when_a_stage_is_slow(commands: Any) -> None:
    """Equal layers by parameters are cut in the middle. Measured, the first one is worth three. While the job runs,
    the second process turns out to be slow. Parameters and momentum stay those of one process. Its trace has every
    forward and backward of both stages.
    """
    script = commands.script(UNEVEN)
    result = commands.run("run", "--name", "it", "--trace", *TWO, "--micro-batches", "4", script, "out.pt")
    assert result.code == 0, result.output
    assert_trained_unevenly(commands.folder, result.output)
    made = commands.run("trace", "it", "-o", "trace.json")
    assert made.code == 0, made.output
    assert_traced(json.loads((commands.folder / "trace.json").read_text())["traceEvents"], steps=9, stages=2, micro=4)


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
    "no example": ("Pipeline(Net(), loss)", r"give an example of its inputs with Pipeline\(model, loss_fn, example="),
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


#: The proof has all; the others guard the way of an error from a process to the user.
QUICK = ("few layers", "in place")


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=() if each in QUICK else pytest.mark.proof) for each in WRONG]
)
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
