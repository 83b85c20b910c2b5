"""Syncline for PyTorch: a DataLoader that splits, an optimizer whose rule runs on the servers, schedules."""

from syncline.torch.data import DataLoader
from syncline.torch.optimizer import DistributedOptimizer
from syncline.torch.schedules import Schedule, schedule

__all__ = ["DataLoader", "DistributedOptimizer", "Schedule", "schedule"]
