"""A pipeline's script for tests, and the same training by plain torch: `pipeline_train.py OUT MODEL DTYPE STEPS`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
from torch import nn

BATCH, LR = 24, 0.05  # of one pipeline


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors, one of which goes through without a gradient."""
        return self.tokens(x), (x == 0)[..., None].float()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0] * (1 - mask), mask


class Head(nn.Module):
    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        self.out.weight = tokens.weight

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def make_stages(model: str, dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(7)
    if model == "tied":
        embed = Embed()
        stages: list[nn.Module] = [embed, Block(), Block(), Head(embed.tokens)]
    else:
        norm: list[nn.Module] = [nn.BatchNorm1d(20)] if model == "norm" else []
        stages = [
            nn.Sequential(nn.Linear(8, 20), nn.ReLU()),
            nn.Sequential(nn.Linear(20, 20), *norm, nn.Tanh()),
            nn.Linear(20, 12),
            nn.Sequential(nn.Tanh(), nn.Linear(12, 5)),
        ]
    return [stage.to(dtype) for stage in stages]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def batches(model: str, dtype: torch.dtype, rank: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in itertools.count():
        noise = torch.Generator().manual_seed(1000 + step * size + rank)
        if model == "tied":
            x = torch.randint(0, 11, (BATCH, 6), generator=noise)
            yield x, x.roll(1, 1)
        else:
            x = torch.randn(BATCH, 8, generator=noise, dtype=dtype)
            yield x, torch.randint(0, 5, (BATCH,), generator=noise)


def make_optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def train_plainly(
    model: str, dtype: torch.dtype, optimizer: str, num_steps: int, num_pipelines: int, num_micro: int
) -> dict[str, torch.Tensor]:
    """What one process of plain torch makes of the same batches, cut into the same micro-batches."""
    stages = make_stages(model, dtype)
    whole = nn.Sequential(*stages)
    opt = make_optimizer(optimizer, whole.parameters())
    sources = [batches(model, dtype, rank, num_pipelines) for rank in range(num_pipelines)]
    for _ in range(num_steps):
        opt.zero_grad()
        for source in sources:
            x, y = next(source)
            for a, b in zip(x.chunk(num_micro), y.chunk(num_micro), strict=True):
                out: object = a
                for stage in stages:
                    out = stage(*out) if isinstance(out, tuple) else stage(out)
                (loss_fn(out, b) / num_micro / num_pipelines).backward()  # type: ignore[arg-type]
        opt.step()
    return {name: value.detach().clone() for name, value in whole.state_dict().items()}


def main(path: str, model: str, dtype_name: str, optimizer: str, num_steps: int) -> None:
    import syncline
    from syncline.torch import DistributedOptimizer, Pipeline

    job, dtype = syncline.init(), getattr(torch, dtype_name)
    print(f"the script of {job.name}")  # once for a pipeline
    pipe = Pipeline(stages=make_stages(model, dtype), loss_fn=loss_fn)
    opt = DistributedOptimizer(make_optimizer(optimizer, pipe.parameters()), model=pipe)
    source = batches(model, dtype, job.rank, job.world_size)
    for _ in range(num_steps):
        loss = pipe.step(*next(source))
        opt.step()
        opt.zero_grad()
    opt.pull()
    pipe.eval()
    x, _ = next(batches(model, dtype, 0, 1))
    output = pipe.evaluate(x)
    if job.is_chief:
        torch.save({"state": pipe.state_dict(), "output": output, "loss": loss}, path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
