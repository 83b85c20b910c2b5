"""A GAN on a ring of points: two models, two optimizers, two steps of an iteration."""

import math

import probe
import torch
import torch.nn as nn

import syncline
from syncline.torch import DistributedOptimizer

num_iterations = 120
batch_size = 32
nz = 4
real_label, fake_label = 1.0, 0.0


def real_points(count):
    angle = torch.rand(count) * 2 * math.pi
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


def main():
    job = syncline.init()
    syncline.seed_everything(999)
    device = job.device

    netG = nn.Sequential(nn.Linear(nz, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    netD = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    netD = netD.to(device)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = DistributedOptimizer(torch.optim.Adam(netD.parameters(), lr=5e-3, betas=(0.5, 0.999)), model=netD)
    optimizerG = DistributedOptimizer(torch.optim.Adam(netG.parameters(), lr=2.5e-3, betas=(0.5, 0.999)), model=netG)

    for i in job.steps(num_iterations):
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = real_points(batch_size).to(device)
        errD_real = criterion(netD(real).view(-1), torch.full((batch_size,), real_label, device=device))
        errD_real.backward()
        fake = netG(torch.randn(batch_size, nz, device=device))
        errD_fake = criterion(netD(fake.detach()).view(-1), torch.full((batch_size,), fake_label, device=device))
        errD_fake.backward()
        optimizerD.step()

        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
        errG = criterion(netD(fake).view(-1), torch.full((batch_size,), real_label, device=device))
        errG.backward()
        optimizerG.step()
        probe.stepped(job)

        if i % 40 == 0 and job.is_chief:
            print(f"[{i}/{num_iterations}] Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")

    job.barrier("trained")
    optimizerD.pull()
    optimizerG.pull()
    with torch.no_grad():
        points = netG(torch.randn(500, nz, generator=torch.Generator().manual_seed(1)).to(device))
        distance = (points.norm(dim=1) - 1).abs().mean().item()
    probe.result(job, distance, netG, netD)


if __name__ == "__main__":
    main()
