"""What scripts do besides, with a Pipeline (`pipeline_ways.py OUT WAY`) and in one process of plain torch."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NUM_STEPS, NUM_MICRO, BATCH, LR, CLIP = 6, 4, 16, 0.2, 0.05
#: Ways of the script itself.
WAYS = ("clip_norm", "scaler", "accumulation", "autocast", "schedule", "checkpointing")


class Layer(nn.Module):
    def __init__(self, width: int, out: int, *, recomputes: bool) -> None:
        super().__init__()
        self.linear, self._recomputes = nn.Linear(width, out), recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._recomputes:
            return checkpoint(self._compute, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def make_layers(way: str) -> list[nn.Module]:
    torch.manual_seed(3)
    sizes = [6, 12, 12, 12, 2]
    kind = torch.float32 if way in ("autocast", "scaler") else torch.float64
    return [Layer(width, out, recomputes=way == "checkpointing").to(kind) for width, out in itertools.pairwise(sizes)]


def batch(number: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, 6, generator=noise, dtype=torch.float64)
    return x.to(kind), torch.randn(BATCH, 2, generator=noise, dtype=torch.float64).to(kind)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.to(target.dtype), target)


def make_scaler(way: str) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if way == "scaler" else None


def train(way: str, optimizer: Any, scaler: torch.amp.GradScaler | None, compute: Any) -> list[float]:
    """`compute(x, y)`: the gradients of a batch, added to those that are there. Returns the scales."""
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5) if way == "schedule" else None
    kind = optimizer.param_groups[0]["params"][0].dtype
    scales = []
    for step in range(NUM_STEPS):
        for number in range(2 if way == "accumulation" else 1):
            with torch.autocast("cpu", dtype=torch.bfloat16) if way == "autocast" else contextlib.nullcontext():
                compute(*batch(10 * step + number, kind))
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        else:
            optimizer.step()
        optimizer.zero_grad()
        if decay is not None:
            decay.step()
    return scales


def train_plainly(way: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, scaler = nn.Sequential(*make_layers(way)), make_scaler(way)
    learned = list(model.parameters())

    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if way == "clip_norm":
                nn.utils.clip_grad_norm_(learned, CLIP)
            return super().step(closure)

    def compute(x: torch.Tensor, y: torch.Tensor) -> None:
        for a, b in zip(x.chunk(NUM_MICRO), y.chunk(NUM_MICRO), strict=True):
            loss = loss_fn(model(a), b) / NUM_MICRO
            (loss if scaler is None else scaler.scale(loss)).backward()

    scales = train(way, Clipped(learned, lr=LR, momentum=0.9), scaler, compute)
    return model.state_dict(), scales


def main(path: str, way: str) -> None:
    import syncline
    from syncline.torch import DistributedOptimizer, Pipeline

    job = syncline.init()
    pipe, scaler = Pipeline(stages=make_layers(way), loss_fn=loss_fn), make_scaler(way)
    opt = DistributedOptimizer(
        torch.optim.SGD(pipe.parameters(), lr=LR, momentum=0.9),
        model=pipe,
        clip_norm=CLIP if way == "clip_norm" else None,
    )
    scales = train(way, opt, scaler, lambda x, y: pipe.step(x, y, scaler=scaler))
    opt.pull()
    pipe.eval()
    x, _ = batch(99, next(pipe.parameters()).dtype)
    if job.is_chief:
        torch.save({"state": pipe.state_dict(), "scales": scales, "output": pipe.evaluate(x)}, path)


if __name__ == "__main__":
    main(*sys.argv[1:3])
