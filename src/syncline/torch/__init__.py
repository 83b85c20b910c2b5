"""Syncline for PyTorch: a DataLoader that splits, and an optimizer whose rule runs on the servers."""

from syncline.torch.data import DataLoader
from syncline.torch.optimizer import DistributedOptimizer

__all__ = ["DataLoader", "DistributedOptimizer"]
