"""A recommender: embeddings of users and items, a dense optimizer, the error on ratings held back."""

import argparse

import probe
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset

import syncline
from syncline.torch import DataLoader, DistributedOptimizer

num_users, num_items, num_ratings = 60, 40, 1600


class Ratings(Dataset):
    """Who rated what, and how: by tastes that the model does not see."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        tastes = torch.randn(num_users, 3, generator=generator), torch.randn(num_items, 3, generator=generator)
        pairs = torch.randperm(num_users * num_items, generator=generator)[:num_ratings]
        self.users, self.items = pairs // num_items, pairs % num_items
        noise = 0.1 * torch.randn(num_ratings, generator=generator)
        self.ratings = (tastes[0][self.users] * tastes[1][self.items]).sum(1) + noise

    def __len__(self):
        return len(self.ratings)

    def __getitem__(self, k):
        return {"user": self.users[k], "item": self.items[k], "rating": self.ratings[k]}


class MatrixFactorization(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.user, self.item = nn.Embedding(num_users, width), nn.Embedding(num_items, width)
        self.user_bias, self.item_bias = nn.Embedding(num_users, 1), nn.Embedding(num_items, 1)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.3)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user, item):
        bias = self.user_bias(user) + self.item_bias(item)
        return (self.user(user) * self.item(item)).sum(1) + bias.squeeze(1)


def rmse(model, loader):
    model.eval()
    with torch.no_grad():
        error = sum(F.mse_loss(model(b["user"], b["item"]), b["rating"], reduction="sum") for b in loader)
    return (error / len(loader.dataset)).sqrt().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()

    job = syncline.init()
    syncline.seed_everything(3)
    ratings = Ratings()
    train_set, test_set = Subset(ratings, range(1440)), Subset(ratings, range(1440, num_ratings))
    loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)
    model = MatrixFactorization()
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05), model=model)

    for epoch in loader.epochs(args.epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch["user"], batch["item"]), batch["rating"])
            loss.backward()
            optimizer.step()
            probe.stepped(job, batch["user"].double()[:, None] * 1000 + batch["item"][:, None])
        if job.is_chief:
            print(f"epoch {epoch}: RMSE {rmse(model, test_loader):.4f}")

    job.barrier("trained")
    optimizer.pull()
    probe.result(job, rmse(model, test_loader), model)


if __name__ == "__main__":
    main()
