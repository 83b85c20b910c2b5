"""A pipeline's script for tests (`pipeline_train.py OUT MODEL DTYPE RULE STEPS`), and the same by plain torch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from syncline.torch import Pipeline

BATCH, LR = 24, 0.02  # of one pipeline


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


class LeNet(nn.Module):
    """As people write it: shapes are read, functions stand between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, padding=2), nn.Conv2d(4, 8, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8 * 2 * 2, 24), nn.Linear(24, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.view(x.shape[0], -1)))
        return self.fc3(torch.relu(self.fc2(x)))


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if stride != 1 or before != after
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18, with an eighth of its channels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        sizes = [(1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]
        after = [1, 1, 2, 2, 4, 4, 8, 8]
        self.blocks = nn.Sequential(
            *(
                Residual(width * before, width * wide, stride)
                for (before, stride), wide in zip(sizes, after, strict=True)
            )
        )
        self.fc = nn.Linear(8 * width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


#: Models that are traced; the others are given as stages.
WHOLE = {"lenet": LeNet, "resnet": ResNet18}


def make_stages(model: str, dtype: torch.dtype) -> list[nn.Module]:
    torch.manual_seed(7)
    if model in WHOLE:
        return [WHOLE[model]().to(dtype)]
    if model == "tied":
        embed = Embed()
        stages: list[nn.Module] = [embed, *(Block() for _ in range(6)), Head(embed.tokens)]
    else:
        norm: list[nn.Module] = [nn.BatchNorm1d(20)] if model == "norm" else []
        stages = [nn.Sequential(nn.Linear(8, 20), nn.ReLU())]
        stages += [nn.Sequential(nn.Linear(20, 20), *norm, nn.Tanh()) for _ in range(6)]
        stages += [nn.Sequential(nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 5))]
    return [stage.to(dtype) for stage in stages]


def make_pipeline(model: str, dtype: torch.dtype) -> Pipeline:
    from syncline.torch import Pipeline

    stages = make_stages(model, dtype)
    if model in WHOLE:
        x, _ = next(batches(model, dtype, 0, 1))
        return Pipeline(stages[0], loss_fn, example=(x,))
    return Pipeline(stages=stages, loss_fn=loss_fn)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def batches(model: str, dtype: torch.dtype, rank: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in itertools.count():
        noise = torch.Generator().manual_seed(1000 + step * size + rank)
        if model == "tied":
            x = torch.randint(0, 11, (BATCH, 6), generator=noise)
            yield x, x.roll(1, 1)
        elif model in WHOLE:
            x = torch.randn(BATCH, 1, 16, 16, generator=noise, dtype=dtype)
            yield x, torch.randint(0, 5, (BATCH,), generator=noise)
        else:
            x = torch.randn(BATCH, 8, generator=noise, dtype=dtype)
            yield x, torch.randint(0, 5, (BATCH,), generator=noise)


def make_optimizer(name: str, parameters: Iterator[nn.Parameter], **more: Any) -> torch.optim.Optimizer:
    """By the name of its class; `SGD` with momentum.

    The bias of an attention's keys has no gradient but what rounding leaves, about 1e-17, and that differs by the
    order of sums. Adagrad and Adafactor would make a visible step of it: by default they divide by 1e-10 and less.
    """
    options: dict[str, dict[str, Any]] = {
        "SGD": {"lr": LR, "momentum": 0.9},
        "Adagrad": {"eps": 1e-6},
        "Adafactor": {"eps": (1e-6, 1e-3)},
    }
    return getattr(torch.optim, name)(parameters, **options.get(name, {}), **more)


def train_plainly(
    model: str, dtype: torch.dtype, optimizer: str, num_steps: int, num_pipelines: int, num_micro: int
) -> dict[str, torch.Tensor]:
    """What one process of plain torch makes of the same batches, cut into the same micro-batches.

    It adds gradients in the job's order, each pipeline's own first, and has the server's fused rule: in 20 steps a
    ResNet of 32 bits makes a difference of 0.1 of a change in its last bit.
    """
    stages = make_stages(model, dtype)
    whole = stages[0] if model in WHOLE else nn.Sequential(*stages)
    opt = make_optimizer(optimizer, whole.parameters(), **({"fused": True} if optimizer == "SGD" else {}))
    sources = [batches(model, dtype, rank, num_pipelines) for rank in range(num_pipelines)]
    learned = list(whole.parameters())
    for _ in range(num_steps):
        sums = []
        for source in sources:
            opt.zero_grad()
            x, y = next(source)
            for a, b in zip(x.chunk(num_micro), y.chunk(num_micro), strict=True):
                out: object = a
                for stage in stages:
                    out = stage(*out) if isinstance(out, tuple) else stage(out)
                (loss_fn(out, b) / num_micro).backward()  # type: ignore[arg-type]
            sums.append([parameter.grad for parameter in learned])
        for parameter, *each in zip(learned, *sums, strict=True):
            parameter.grad = sum(each) / num_pipelines
        opt.step()
    return {name: value.detach().clone() for name, value in whole.state_dict().items()}


def main(path: str, model: str, dtype_name: str, optimizer: str, num_steps: int) -> None:
    import syncline
    from syncline.torch import DistributedOptimizer

    job, dtype = syncline.init(), getattr(torch, dtype_name)
    print(f"the script of {job.name}")  # once for a pipeline
    pipe = make_pipeline(model, dtype)
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
