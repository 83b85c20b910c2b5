"""A model that keeps a core busy, for so many seconds. Started by test_auto.py."""

from __future__ import annotations

import argparse
import time

import torch

import syncline
from syncline.torch import DataLoader, DistributedOptimizer

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, required=True)
args = parser.parse_args()

job = syncline.init()
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), *(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(4096, 256)), 128, shuffle=True)
until = time.monotonic() + args.seconds
while time.monotonic() < until:
    for (x,) in loader:
        optimizer.zero_grad()
        for _ in range(8):
            model(x).square().mean().backward()
        optimizer.step()
        if time.monotonic() > until:
            break
