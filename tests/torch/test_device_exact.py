"""No race between a script's work on a device and the copies beside it: integers, and every number must be exact.

Gradients are integers and the learning rate is 1. Every forward looks at every parameter it reads, after random
delays, backward has delays of its own, and so have the servers: whatever is read or sent too early, too late or
from the wrong place is a wrong integer.
"""

from __future__ import annotations

import contextlib
import pathlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENCE
from torch import nn

from syncline.server.rules import SliceRules
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.torch.streams import CudaSide
from syncline.worker.job import Job

SIZES = (5, 3000, 700, 64, 1)
SIZES_ON_A_GPU = (5, 400_000, 1000, 90_000, 1)


def nap(chance: random.Random, device: str) -> None:
    """The script's own stream is busy: often for up to a millisecond, sometimes for so long that the CPU is ahead."""
    if device == "cpu":
        return
    number = chance.random()
    if number < 0.3:
        torch.cuda._sleep(int(chance.random() * (3e7 if number < 0.02 else 1.5e6)))


def delay_copies(setattr: Callable[[Any, str, Any], None]) -> None:
    """On a GPU, the copies beside the script's stream are late now and then, too."""
    chance, copy = random.Random(7), CudaSide.copy

    def late(self: CudaSide, target: torch.Tensor, source: torch.Tensor) -> None:
        if chance.random() < 0.05:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(int(chance.random() * 6e6))
        copy(self, target, source)

    setattr(CudaSide, "copy", late)


class Nap(torch.autograd.Function):
    """Nothing, but with a delay in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, chance: random.Random, device: str) -> torch.Tensor:
        ctx.chance, ctx.device = chance, device
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        nap(ctx.chance, ctx.device)
        return gradient, None, None


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor, factors: torch.Tensor, seen: list[torch.Tensor | None]) -> torch.Tensor:
        weight = self.weight
        seen.append(weight.detach().clone())
        return x + (weight * factors).sum()


class Plan:
    """What each worker does in each step, known to all of them."""

    def __init__(self, seed: int, sizes: tuple[int, ...], device: str, workers: int) -> None:
        self._chance = random.Random(seed)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._sizes, self._device, self._workers = sizes, device, workers

    def step(self) -> list[list[tuple[torch.Tensor, str]]]:
        """For each worker and layer: the factors, and what else happens to the gradient."""
        kinds = ["plain", "plain", "plain", "plain", "unused", "unread", "negated", "twice"]
        return [
            [(self._factors(size), self._chance.choice(kinds)) for size in self._sizes] for _ in range(self._workers)
        ]

    def _factors(self, size: int) -> torch.Tensor:
        return 2.0 * torch.randint(-4, 5, (size,), generator=self._generator, device=self._device)


def gradient_of(factors: torch.Tensor, kind: str) -> torch.Tensor:
    return factors * {"plain": 1.0, "unused": 0.0, "unread": 0.0, "negated": -1.0, "twice": 2.0}[kind]


def one_step(
    model: nn.ModuleList, opt: Any, mine: Any, chance: random.Random, device: str
) -> list[torch.Tensor | None]:
    """Forward, backward, what else there is, and the step; the parameters as forward saw them."""
    opt.zero_grad(set_to_none=chance.random() < 0.7)
    seen: list[torch.Tensor | None] = []
    x = torch.zeros((), device=device, requires_grad=True)
    again = torch.zeros((), device=device)
    for layer, (factors, kind) in zip(model, mine, strict=True):
        nap(chance, device)
        if kind == "unread":
            parameter = dict.__getitem__(layer._parameters, "weight")
            parameter.grad = None
            seen.append(None)
        elif kind != "unused":
            x = Nap.apply(layer(x, factors, seen), chance, device)
        else:
            layer.weight.grad = None
            seen.append(layer.weight.detach().clone())
        if kind == "twice":
            again = layer(again, factors, [])
    x.backward()
    if again.requires_grad:
        again.backward()
    nap(chance, device)
    for layer, (_, kind) in zip(model, mine, strict=True):
        if kind == "negated":
            layer.weight.grad.data.neg_()
    opt.step()
    return seen


def differ(found: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor]) -> torch.Tensor:
    """Which are not as expected, as a tensor on their device."""
    pairs = zip(found, expected, strict=True)
    return torch.stack([(two if one is None else one).ne(two).any() for one, two in pairs])


def stress(job: Job, device: str, steps: int, seed: int = 0, *, own_stream: bool = False) -> None:
    """Raises an AssertionError that names the first step and layer at which a parameter was wrong."""
    sizes = SIZES if device == "cpu" else SIZES_ON_A_GPU
    chance = random.Random(1000 * seed + job.rank)
    plan = Plan(seed, sizes, device, job.world_size)
    behind = job.config.window  # forwards see parameters this many updates old
    stream = torch.cuda.Stream() if own_stream else None
    with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
        model = nn.ModuleList(Layer(size) for size in sizes).to(device)
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
        states = [[torch.zeros(size, device=device) for size in sizes]]
        wrong = []
        for _ in range(steps):
            everyone = plan.step()
            seen = one_step(model, opt, everyone[job.rank], chance, device)
            visible = states[max(0, len(states) - 1 - behind)]
            wrong.append(differ(seen, visible))
            update = [
                sum(gradient_of(*each) for each in layer) / job.world_size for layer in zip(*everyone, strict=True)
            ]
            states.append([old - new for old, new in zip(states[-1], update, strict=True)])
            del states[:-3]
            if chance.random() < 0.1:
                sum(float(p.detach().sum()) for p in model.parameters())
        job.barrier("all pushes are in the model")
        final = [tensor.clone() for tensor in model.state_dict().values()]
        wrong.append(differ(final, states[-1]))
        found = torch.stack(wrong).nonzero().tolist()
    assert not found, f"{job.name}: wrong at (step, layer) {found[:5]}, {len(found)} in all"


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are late, and so are servers."""
    delay_copies(monkeypatch.setattr)
    chance, apply = random.Random(5), SliceRules.apply

    def slowly(self: SliceRules, *arguments: Any, **more: Any) -> Any:
        if chance.random() < 0.05:
            time.sleep(0.004 * chance.random())
        return apply(self, *arguments, **more)

    monkeypatch.setattr(SliceRules, "apply", slowly)


CASES = [
    {"workers": 1},
    {"workers": 2, "servers": 2},
    {"workers": 1, "policy": "async"},
    {"workers": 1, "policy": "async", "window": 1},
    {"workers": 1, "policy": "bounded:1", "window": 1, "servers": 2},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_every_parameter_is_exact_under_random_delays(device: str, case: dict[str, Any], delays: None) -> None:
    slice_bytes = 1024 if device == "cpu" else 65536
    with local_job(**case, slice_bytes=slice_bytes) as jobs:
        jobs.run(lambda job: stress(job, device, 50 if device == "cpu" else 300), timeout_seconds=PATIENCE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: "-".join(str(value) for value in case.values()))
def test_a_script_with_a_stream_of_its_own(case: dict[str, Any], delays: None) -> None:
    with local_job(**case, slice_bytes=65536) as jobs:
        jobs.run(lambda job: stress(job, "cuda:0", 200, own_stream=True), timeout_seconds=PATIENCE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", CASES[1:4], ids=lambda case: "-".join(str(value) for value in case.values()))
def test_servers_on_the_gpu_are_exact_too(case: dict[str, Any], delays: None) -> None:
    with local_job(**case, slice_bytes=65536, server_device="cuda") as jobs:
        jobs.run(lambda job: stress(job, "cuda:0", 100), timeout_seconds=PATIENCE)


SCRIPT = """
import importlib.util, pathlib, sys
import syncline

sys.path.append(str(pathlib.Path(sys.argv[1]).parents[1]))  # where `tests` is

def load(name):
    spec = importlib.util.spec_from_file_location(name, f"{sys.argv[1]}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

device = sys.argv[2]
if device == "cpu":
    load("conftest").go_the_slow_way(setattr, 0.2)
job = syncline.init()
exact = load("test_device_exact")
exact.delay_copies(setattr)
exact.stress(job, device, 60 if device == "cpu" else 200)
print("exact")
"""


POLICIES = {"sync": ("-w", "2"), "async": ("-w", "1", "--policy", "async", "--window", "1")}


def ways() -> list[Any]:
    """On a CPU they are `make proof`."""
    found = []
    for name, flags in POLICIES.items():
        for transport in ("shm", "tcp"):
            for on in ("cpu", "cuda:0"):
                late = on == "cpu"
                marks = [pytest.mark.proof] if late else []
                found.append(pytest.param(flags, transport, on, marks=marks, id=f"{name}-{transport}-{on}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "transport", "on"), ways())
def test_every_parameter_is_exact_between_processes(
    policy: tuple[str, ...], transport: str, on: str, tmp_path: pathlib.Path
) -> None:
    if on != "cpu" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    (tmp_path / "train.py").write_text(SCRIPT)
    here = pathlib.Path(__file__).parent
    command = [sys.executable, "-m", "syncline", "run", "-s", "2", *policy, "--transport", transport, "--device", on]
    result = forked.run(
        [*command, "train.py", str(here), on], cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    assert result.returncode == 0 and "exact" in result.stdout, result.stdout[-3000:]
