"""LeNet on Fashion-MNIST with a validation behind every epoch, on samples that are not trained with."""

from __future__ import annotations

import pathlib
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import syncline
from syncline.torch import DataLoader, DistributedOptimizer

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
from fashion_mnist import lenet, load

NUM_VALIDATED = 6000


def held_out() -> tuple[TensorDataset, TensorDataset]:
    """What is trained with, and what is validated on."""
    images, labels = load(train=True)
    return (
        TensorDataset(images[NUM_VALIDATED:], labels[NUM_VALIDATED:]),
        TensorDataset(images[:NUM_VALIDATED], labels[:NUM_VALIDATED]),
    )


def accuracy_of(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    with torch.no_grad():
        images, labels = data.tensors
        answers = torch.cat([model(part).argmax(1) for part in images.split(500)])
        return (answers == labels).double().mean().item()


def main() -> None:
    job = syncline.init()
    torch.manual_seed(0)
    train, validate = held_out()
    model = lenet()
    opt = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=4e-3), model=model)
    loader = DataLoader(train, 64, shuffle=True)

    def measure(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        answers = model(batch[0])
        right = (answers.argmax(1) == batch[1]).double().mean()
        return {"accuracy": right, "loss": F.cross_entropy(answers, batch[1])}

    job.validate(measure, validate, every=sys.argv[1])
    for _ in range(int(sys.argv[2])):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
    job.close()


if __name__ == "__main__":
    main()
