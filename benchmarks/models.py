"""The models that both sides train, and one step of training."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.convnet import resnet
from benchmarks.task import Task
from benchmarks.transformer import Transformer

Batch = tuple[torch.Tensor, torch.Tensor]
Optimizing = Callable[[nn.Module], torch.optim.Optimizer]


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Slowly(torch.autograd.Function):
    """Passes its input on. Its backward sleeps, and then has a gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        (weight,) = ctx.saved_tensors
        return gradients[0], torch.full_like(weight, 1e-3), None


class _SlowLayer(nn.Module):
    def __init__(self, size: int, seconds: float) -> None:
        super().__init__()
        self.weight, self._seconds = nn.Parameter(torch.zeros(size)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = _Slowly.apply(x, self.weight, self._seconds)  # type: ignore[no-untyped-call]
        return passed


def slow(num_layers: int, layer_bytes: int, seconds: float) -> nn.Module:
    """A model whose backward takes so long and leaves the cores idle, as one on an accelerator does."""
    layers = [_SlowLayer(layer_bytes // 4, seconds / num_layers) for _ in range(num_layers)]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), *layers)


def images(batch_size: int, generator: torch.Generator) -> Batch:
    x = torch.randn(batch_size, 1, 28, 28, generator=generator)
    return x, torch.randint(10, (batch_size,), generator=generator)


def pictures(batch_size: int, generator: torch.Generator) -> Batch:
    x = torch.randn(batch_size, 3, 224, 224, generator=generator)
    return x, torch.randint(1000, (batch_size,), generator=generator)


def tokens(num_words: int, length: int) -> Callable[[int, torch.Generator], Batch]:
    """Texts of chance, and the word that comes after each."""

    def batch(batch_size: int, generator: torch.Generator) -> Batch:
        text = torch.randint(num_words, (batch_size, length + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].flatten()

    return batch


def _sgd(momentum: float) -> Optimizing:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)


def _adam(lr: float = 1e-3, fused: bool | None = None) -> Optimizing:
    return lambda model: torch.optim.Adam(model.parameters(), lr=lr, fused=fused)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model, its data, and its optimizer as a plain script has it."""

    build: Callable[[], nn.Module]
    batch_size: int
    optimizer: Optimizing
    data: Callable[[int, torch.Generator], Batch] = images
    dtype: torch.dtype = torch.float32  # of the parameters
    is_mixed: bool = False  # computes in bfloat16 where torch.autocast does
    is_compiled: bool = False
    has_channels_last: bool = False


def _gpt(batch_size: int, dtype: torch.dtype) -> Recipe:
    """As GPT-2's smallest, 124 million parameters."""
    return Recipe(
        build=lambda: Transformer(num_layers=12, width=768, num_heads=12, num_words=50304, length=1024),
        batch_size=batch_size,
        optimizer=_adam(1e-4, fused=True),
        data=tokens(50304, 1024),
        dtype=dtype,
    )


def _mixed_gpt(batch_size: int, *, is_compiled: bool = False) -> Recipe:
    """The same as it is trained today."""
    recipe = _gpt(batch_size, torch.float32)
    return dataclasses.replace(recipe, optimizer=_adamw, is_mixed=True, is_compiled=is_compiled)


MODELS = {
    "lenet": Recipe(build=lenet, batch_size=64, optimizer=_adam()),
    "mlp-small": Recipe(build=lambda: mlp(784, 128, 10), batch_size=64, optimizer=_adam()),
    "mlp-wide": Recipe(build=lambda: mlp(784, 2048, 2048, 10), batch_size=32, optimizer=_sgd(0.9)),
    "slow-300": Recipe(build=lambda: slow(12, 2 << 20, 0.3), batch_size=4, optimizer=_sgd(0.0)),
    "slow-1200": Recipe(build=lambda: slow(12, 2 << 20, 1.2), batch_size=4, optimizer=_sgd(0.0)),
    "mlp-tiny": Recipe(build=lambda: mlp(784, 4, 10), batch_size=4, optimizer=_sgd(0.0)),
    "gpt": _gpt(8, torch.float32),
    "gpt-bf16": _gpt(64, torch.bfloat16),
    "gpt-24": _mixed_gpt(24),
    "gpt-8": _mixed_gpt(8),
    "gpt-compiled": _mixed_gpt(24, is_compiled=True),
    "resnet": Recipe(
        build=resnet,
        batch_size=128,
        optimizer=_sgd(0.9),
        data=pictures,
        is_mixed=True,
        has_channels_last=True,
    ),
    "gpt-tiny": Recipe(
        build=lambda: Transformer(num_layers=1, width=8, num_heads=2, num_words=32, length=16),
        batch_size=2,
        optimizer=_adam(fused=True),
        data=tokens(32, 16),
        dtype=torch.bfloat16,
    ),
}


def _mlp_of(widths: Sequence[int]) -> Recipe:
    return Recipe(build=lambda: mlp(*widths), batch_size=32, optimizer=_adam())


@dataclasses.dataclass(frozen=True)
class Training:
    """What one process trains: the same parameters in every process, each its own batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    autocast: Callable[[], Any] = contextlib.nullcontext


def make(task: Task, seed: int) -> Training:
    """What the task says; the seed is the batch's."""
    if task.num_threads:
        torch.set_num_threads(task.num_threads)
    torch.manual_seed(0)
    recipe = _mlp_of(task.widths) if task.widths else MODELS[task.model]
    model = recipe.build().to(task.device, recipe.dtype)
    if recipe.has_channels_last:
        for parameter in model.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    if recipe.is_compiled:
        model.compile()
    x, y = (part.to(task.device) for part in recipe.data(recipe.batch_size, torch.Generator().manual_seed(seed)))
    x = x.to(recipe.dtype) if x.is_floating_point() else x
    x = x.contiguous(memory_format=torch.channels_last) if recipe.has_channels_last else x
    training = Training(model, recipe.optimizer(model), (x, y))
    if not recipe.is_mixed:
        return training
    kind = torch.device(task.device).type
    return dataclasses.replace(training, autocast=lambda: torch.autocast(kind, torch.bfloat16))


def training_step(training: Training) -> Callable[[], None]:
    """One step on a batch that stays the same: nothing but the step is measured."""
    model, optimizer, (x, y) = training.model, training.optimizer, training.batch

    def step() -> None:
        with training.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def backward_step(training: Training, then: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Forward and backward, then something; the gradients are still there at the end."""
    model, (x, y) = training.model, training.batch

    def step() -> None:
        model.zero_grad()
        with training.autocast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        then()

    return step


def settling(device: str) -> Callable[[], object]:
    """What waits for the operations that a device has under way."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None
