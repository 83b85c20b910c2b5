"""What tests of pipelines share: the comparison with one process, jobs whose end is known, and their processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from tests.launch import pipeline_ways
from tests.launch.pipeline_train import WHOLE, batches, make_stages, train_plainly
from tests.patience import JOB_PATIENCE, PATIENT_START

SCRIPT = str(pathlib.Path(__file__).with_name("pipeline_train.py"))
NUM_STEPS, NUM_MICRO = 20, 6


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def trains_as_one_process_does(
    commands: Any, workers: int, stages: int, schedule: str, model: str, dtype: str, optimizer: str, *more: str
) -> float:
    """Asserts that 20 steps of pipelines are those of one process; the largest difference of a parameter."""
    result = commands.run(
        "run", "-w", str(workers), "--stages", str(stages), "--schedule", schedule, "--micro-batches", str(NUM_MICRO),
        *more, SCRIPT, "out.pt", model, dtype, optimizer, str(NUM_STEPS),
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("the script of worker-0") == 1, result.output
    assert "gradients were edited after backward" not in result.output, result.output
    found = torch.load(commands.folder / "out.pt", weights_only=True)
    kind, replicas = getattr(torch, dtype), workers // stages
    with one_thread():  # several spin for each other, and these tensors are small
        wanted = train_plainly(model, kind, optimizer, NUM_STEPS, replicas, NUM_MICRO)
    before = make_stages(model, kind)
    whole = before[0] if model in WHOLE else torch.nn.Sequential(*before)
    assert found["state"].keys() == wanted.keys()
    limit, largest = 1e-10 if dtype == "float64" else 1e-5, 0.0
    learned = dict(whole.named_parameters())
    for name, value in wanted.items():
        if name not in learned and replicas > 1:
            continue  # running means: each replica has seen its own batches
        largest = max(largest, float((found["state"][name] - value).abs().max()))
        assert torch.allclose(found["state"][name], value, rtol=limit, atol=limit), (name, largest)
    assert all(not torch.equal(found["state"][name], value) for name, value in learned.items())
    whole.load_state_dict(found["state"])
    x, _ = next(batches(model, kind, 0, 1))
    with one_thread(), torch.no_grad():
        given: object = x
        for stage in [whole] if model in WHOLE else before:
            stage.eval()
            given = stage(*given) if isinstance(given, tuple) else stage(given)
    assert found["output"].dtype == kind and isinstance(given, torch.Tensor)
    assert torch.allclose(found["output"], given, rtol=limit, atol=limit)
    return largest


def trains_in_this_way(commands: Any, way: str, *options: str, limit: float = 1e-10) -> None:
    """Asserts that two stages with such a script, or such options, do what one process of plain torch does."""
    result = commands.run(
        "run", "-w", "2", "--stages", "2", "--micro-batches", str(pipeline_ways.NUM_MICRO), *options,
        str(pathlib.Path(SCRIPT).with_name("pipeline_ways.py")), "out.pt", way,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert "gradients were edited after backward" not in result.output, result.output
    found = torch.load(commands.folder / "out.pt", weights_only=True)
    with one_thread():
        wanted, scales = pipeline_ways.train_plainly(way)
    assert found["scales"] == scales and found["state"].keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found["state"][name], value, rtol=limit, atol=limit), name
    model = torch.nn.Sequential(*pipeline_ways.make_layers(way))
    assert all(not torch.equal(found["state"][name], value) for name, value in model.state_dict().items())
    model.load_state_dict(found["state"])
    x, _ = pipeline_ways.batch(99, next(model.parameters()).dtype)
    assert torch.allclose(found["output"], model(x), rtol=1e-5, atol=1e-6)


INTEGERS = """
    import sys, time, torch, syncline
    from torch import nn
    from syncline.torch import DataLoader, DistributedOptimizer, Pipeline

    class Whole(nn.Module):  # gradients are whole numbers: sums of them have no order
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(width))
        def forward(self, x):
            time.sleep(0.01)
            return x + self.weight

    def loss_fn(output, target):
        return (output * target).sum(1).mean()

    path, num_stages, num_samples, num_epochs = sys.argv[1], *map(int, sys.argv[2:5])
    job = syncline.init()
    if "group" in sys.argv:
        torch.distributed.init_process_group("gloo")
    stages = [Whole(4) for _ in range(num_stages)]
    if "tied" in sys.argv:
        for stage in stages:
            stage.weight = stages[0].weight
    pipe = Pipeline(stages=stages, loss_fn=loss_fn)
    opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.5), model=pipe)
    numbers = torch.arange(float(num_samples))
    targets = numbers[:, None].expand(num_samples, 4) * 8
    samples = torch.utils.data.TensorDataset(torch.zeros(num_samples, 4), targets)
    for epoch in range(num_epochs):
        for x, y in DataLoader(samples, batch_size=8, shuffle=True, seed=3, name=f"epoch {epoch}"):
            pipe.step(x, y)
            opt.step(); opt.zero_grad()
            print(f"step {time.monotonic():.3f}", flush=True)
    opt.pull()
    if job.is_chief:
        torch.save(pipe.state_dict(), path)
"""


class IntegerJob:
    """A job of pipelines whose parameters at the end are known: all samples count once, in whatever order.

    Several pipelines train with `async`, where every commit counts alone. In a round of `sync`, how much one counts
    depends on how many there are.
    """

    def __init__(
        self,
        commands: Any,
        pipelines: int,
        stages: int,
        num_samples: int,
        num_epochs: int,
        *options: str,
        is_tied: bool = False,
        makes_group: bool = False,
    ) -> None:
        """`is_tied`: all stages have one parameter, whose gradients are added up. `makes_group`: the script makes a
        process group before its Pipeline.
        """
        self._commands, self._stages, self._times = commands, stages, stages if is_tied else 1
        self._num_samples, self._num_epochs = num_samples, num_epochs
        toml = f"{PATIENT_START}longest_deadline_seconds = 15.0\nmax_restarts = 100\n"
        (commands.folder / "syncline.toml").write_text(toml)
        self.process = commands.start(
            "run", "--name", "it", "-w", str(pipelines * stages), "--stages", str(stages), "--micro-batches", "4",
            "--policy", "sync" if pipelines == 1 else "async", *options,
            commands.script(INTEGERS), "out.pt", str(stages), str(num_samples), str(num_epochs),
            *(["tied"] if is_tied else []), *(["group"] if makes_group else []),
        )  # fmt: skip

    def steps(self, worker: str = "worker-0") -> list[float]:
        """When each step of a worker ended."""
        log = self._commands.folder / "runs" / "it" / f"{worker}.log"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        return [float(line.split()[1]) for line in lines if line.startswith("step ")]

    def wait_for_steps(self, number: int) -> None:
        """Until worker-0 has made so many steps."""
        deadline = time.monotonic() + JOB_PATIENCE
        while len(self.steps()) < number:
            assert self.process.poll() is None, self._commands.finish(self.process).output
            assert time.monotonic() < deadline, f"{len(self.steps())} of {number} steps were made"
            time.sleep(0.02)

    def check(self) -> str:
        """The job ends well, and every sample has counted once: the parameters are exact. Returns its output."""
        result = self._commands.finish(self.process)
        assert result.code == 0, result.output
        found = torch.load(self._commands.folder / "out.pt", weights_only=True)
        assert len(found) == self._stages
        wanted = (
            -0.5 * self._times * self._num_epochs * sum(range(self._num_samples))
        )  # a commit: the mean of 8 times 8 numbers
        for value in found.values():
            assert value.tolist() == [wanted] * 4
        return str(result.output)


UNEVEN = """
    import sys, time, torch, syncline
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
        if step % 2:  # all gradients are made where servers read them
            arena = job.kv.gradients()
            assert all(p.grad.data_ptr() == arena[name].data_ptr() for name, p in pipe.named_parameters())
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)
        print("layers", [stage.layers for stage in pipe.stats()], flush=True)
    spans = pipe.timeline()
    assert len(spans) == 2 * 4 * 2 and all(0 <= span.begin < span.end for span in spans), spans
    assert {(span.stage, span.kind) for span in spans} == {(s, k) for s in (0, 1) for k in "FB"}
    opt.pull()
    torch.save({"state": pipe.state_dict(), "begun": begun}, sys.argv[1])
"""


def assert_trained_unevenly(folder: pathlib.Path, output: str) -> None:
    """Equal layers by parameters are cut in the middle. Measured, the first one is worth three. While the job runs,
    the second process turns out to be slow. Parameters and momentum stay those of one process.
    """
    assert "the pipeline of worker-0, in 2 parts: cut before stages[1] (1 + 3 of 4 layers)" in output, output
    assert "layers ['stages[0]', 'stages[1] … stages[3]']" in output
    assert "process 1 computed at" in output and "another cut would gain" in output, output
    assert "layers ['stages[0] … stages[2]', 'stages[3]']" in output, output
    found = torch.load(folder / "out.pt", weights_only=True)
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


def assert_traced(events: list[dict[str, Any]], *, steps: int, stages: int, micro: int) -> None:
    """Each stage has a lane with its forwards and backwards, inside of the steps of its leader."""
    found = {
        e["args"]["name"]: (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"].startswith(("steps", "stage"))
    }
    assert list(found) == ["steps", *(f"stage {number}" for number in range(stages))]
    spans = {name: [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == at] for name, at in found.items()}
    around = {e["args"]["step"]: e for e in spans.pop("steps") if e["cat"] == "step"}
    wanted = sorted(
        (kind, step + 1, m) for kind in ("backward", "forward") for step in range(steps) for m in range(micro)
    )
    for each in spans.values():
        assert sorted((e["cat"], e["args"]["step"], e["args"]["micro_batch"]) for e in each) == wanted
        for e in each:
            own = around[e["args"]["step"]]
            assert own["ts"] - 1 <= e["ts"] <= e["ts"] + e["dur"] <= own["ts"] + own["dur"] + 1, (e, own)


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


def pipeline_of(folder: pathlib.Path, worker: str) -> tuple[int, ...]:
    """The leader and its stage processes, which have the same command line."""
    return next((pid, *found) for pid in members_named(folder, worker) if (found := processes_of(pid)))


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
