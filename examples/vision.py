"""ResNet-18, VGG-11 or MobileNet on Fashion-MNIST: `syncline run -w 2 -s 1 examples/vision.py --model resnet18`.

The networks are the usual variants for small pictures (32 × 32, three channels, ten classes), written out plainly.
All of them have BatchNorm, whose statistics are buffers: they are the chief's in every worker, or with
`--buffers mean` the mean of all workers.
"""

import argparse
import pathlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import syncline
from syncline.data import fashion_mnist
from syncline.torch import DataLoader, DistributedOptimizer


def convolution(channels_in: int, channels: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution and BatchNorm. The bias is BatchNorm's."""
    conv = nn.Conv2d(channels_in, channels, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels))


class Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(channels_in, channels, stride=stride)
        self.second = convolution(channels, channels)
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else convolution(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet18() -> nn.Sequential:
    """11,173,962 parameters."""
    layers: list[nn.Module] = [convolution(3, 64), nn.ReLU()]
    channels_in = 64
    for channels in (64, 128, 256, 512):
        for stride in (1 if channels == 64 else 2, 1):
            layers.append(Residual(channels_in, channels, stride))
            channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def vgg11() -> nn.Sequential:
    """9,231,114 parameters: the convolutions of VGG-11 with BatchNorm, and one linear layer for ten classes."""
    layers: list[nn.Module] = []
    channels_in = 3
    for channels in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if channels:
            conv = nn.Conv2d(channels_in, channels, 3, padding=1)
            layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
            channels_in = channels
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def mobilenet() -> nn.Sequential:
    """3,217,226 parameters: each block filters the channels one by one, then mixes them."""
    layers: list[nn.Module] = [convolution(3, 32), nn.ReLU()]
    channels_in = 32
    smaller = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)]
    for channels, stride in [*smaller, *[(512, 1)] * 5, (1024, 2), (1024, 1)]:
        layers += [convolution(channels_in, channels_in, stride=stride, groups=channels_in), nn.ReLU()]
        layers += [convolution(channels_in, channels, 1), nn.ReLU()]
        channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10))


MODELS = {"resnet18": resnet18, "vgg11": vgg11, "mobilenet": mobilenet}


def load(train: bool, num_samples: int) -> TensorDataset:
    images, labels = fashion_mnist(train)
    return TensorDataset(torch.tensor(images[:num_samples]), torch.tensor(labels[:num_samples]))


def prepared(images: Tensor, device: torch.device | str) -> Tensor:
    """Grey bytes of 28 × 28 as three equal channels of 32 × 32, about zero."""
    x = F.pad(images.to(device).float() / 255 - 0.5, (2, 2, 2, 2), value=-0.5)
    return x.unsqueeze(1).expand(-1, 3, -1, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--samples", type=int, help="trains on the first so many; tests on a sixth of that")
    parser.add_argument("--buffers", choices=["chief", "mean"], default="chief", help="BatchNorm's statistics")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, help="model file; default: model.pt in the job's folder")
    args = parser.parse_args()

    job = syncline.init()
    torch.manual_seed(args.seed)
    model = MODELS[args.model]().to(job.device)
    sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    opt = DistributedOptimizer(sgd, model=model, buffers=args.buffers)
    num_samples = args.samples or 60_000
    loader = DataLoader(load(True, num_samples), args.batch_size, shuffle=True, seed=args.seed)
    test_set = load(False, max(1, num_samples // 6))

    def measure(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        images, labels = batch
        return {"accuracy": (model(prepared(images, job.device)).argmax(1) == labels.to(job.device)).float().mean()}

    checked = job.validate(measure, test_set)  # after every epoch; the workers share the test set
    for _ in range(args.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(prepared(x, job.device)), y.to(job.device))
            loss.backward()
            opt.step()
            opt.zero_grad()

    job.barrier("trained")  # from here on no worker pushes
    opt.pull()  # the final model, in every worker
    if job.is_chief:
        out = args.out or job.folder / "model.pt"
        out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.cpu().state_dict(), out)
        print(f"model          {args.model}, {sum(p.numel() for p in model.parameters()):,} parameters: {out}")
        print(f"samples/s      {job.stats().samples_per_second:,.0f}")
        print(f"test accuracy  {checked.latest['accuracy']:.2%}")
    job.close()


if __name__ == "__main__":
    main()
