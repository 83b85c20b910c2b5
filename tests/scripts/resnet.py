"""A residual network with BatchNorm, OneCycleLR and an exponential average of the weights."""

import argparse

import probe
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import syncline
from syncline.torch import DataLoader, DistributedOptimizer


class BasicBlock(nn.Module):
    def __init__(self, planes_in, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(planes_in, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or planes_in != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(planes_in, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = BasicBlock(8, 8)
        self.layer2 = BasicBlock(8, 16, stride=2)
        self.linear = nn.Linear(16, num_classes)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer2(self.layer1(out))
        return self.linear(out.mean((2, 3)))


def images(num_samples, seed):
    """Stripes of four directions, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (num_samples,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    stripes = torch.stack([torch.sin(1.5 * s) for s in (rows, columns, rows + columns, rows - columns)])
    noise = torch.randn(num_samples, 3, 8, 8, generator=generator)
    return TensorDataset(stripes[labels].unsqueeze(1) + 0.7 * noise, labels)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    loss, correct, total = 0.0, 0, 0
    for x, y in loader:
        output = model(x.to(device))
        loss += F.cross_entropy(output, y.to(device), reduction="sum").item()
        correct += (output.argmax(1) == y.to(device)).sum().item()
        total += len(y)
    return loss / total, correct / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-lr", type=float, default=0.1)
    args = parser.parse_args()

    job = syncline.init()
    syncline.seed_everything(0)
    device = job.device
    train_loader = DataLoader(images(416, 1), batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(images(200, 2), batch_size=50)

    model = ResNet(4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = DistributedOptimizer(optimizer, model=model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.max_lr, epochs=args.epochs, steps_per_epoch=len(train_loader)
    )
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    job.state["ema"] = ema_model

    for epoch in train_loader.epochs(args.epochs):
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ema_model.update_parameters(model)
            probe.stepped(job, x)
        loss, accuracy = evaluate(ema_model, test_loader, device)
        if job.is_chief:
            print(f"epoch {epoch}: ema loss {loss:.4f}, accuracy {accuracy:.1%}")

    job.barrier("trained")
    optimizer.pull()
    loss, accuracy = evaluate(model, test_loader, device)
    ema_loss, _ = evaluate(ema_model, test_loader, device)
    probe.result(job, loss, model, accuracy=accuracy, ema=ema_loss)


if __name__ == "__main__":
    main()
