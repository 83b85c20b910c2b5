"""A residual network with bottlenecks, as ResNet-50 has them: convolutions and BatchNorm, 25.6 M parameters."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """Fewer channels inside than outside; its input is added to its output."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _conv(inputs, width, 1), _conv(width, width, 3, stride)
        self.last = _conv(width, 4 * width, 1)
        is_same = stride == 1 and inputs == 4 * width
        self.shortcut: nn.Module = nn.Identity() if is_same else _conv(inputs, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = F.relu(self.second(F.relu(self.first(x))))
        return F.relu(self.last(inside) + self.shortcut(x))


def resnet(num_blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, num_classes: int = 1000) -> nn.Module:
    """Four stages by default, each with half the picture's sides and twice the channels of the one before."""
    widths = [width << stage for stage in range(len(num_blocks))]
    inputs = [width, *(4 * each for each in widths)]
    blocks: list[nn.Module] = []
    for stage, (count, inside) in enumerate(zip(num_blocks, widths, strict=True)):
        strides = itertools.chain([1 if stage == 0 else 2], itertools.repeat(1))
        blocks += [
            Bottleneck(inputs[stage] if block == 0 else 4 * inside, inside, next(strides)) for block in range(count)
        ]
    stem = [_conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs[-1], num_classes)]
    return nn.Sequential(*stem, *blocks, *head)
