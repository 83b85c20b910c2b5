"""Data as NumPy arrays: where it lies, what is in it, and batches of it; no framework is imported here.

source                     what a data set is to us: samples by number, or shards in sequence
opening                    `open`: a path or a name in, a source out
arrays, arrow, tar         what is read: arrays and .npy; Parquet and Arrow; tar shards
iterables                  whatever can be iterated over, as shards
table, columns             rows of several files, chunk by chunk; Arrow's columns as arrays
files, extra               paths on this machine and elsewhere; packages that may be missing
plain                      whether a `.npy` file holds plain values, by its header
batching, leased           batches by position; inside a job, what this worker leases of them
positions                  which samples the log of a job means
stacking                   samples put together
saying                     what is told to people
transform                  a function applied to each sample
datasets, idx, iris        data sets with a name
"""

from __future__ import annotations

from syncline.data.arrays import ArraySource
from syncline.data.batching import batches, read_batches
from syncline.data.datasets import fashion_mnist, mnist
from syncline.data.idx import read_idx
from syncline.data.iterables import IterableSource
from syncline.data.opening import open_source as open
from syncline.data.positions import samples_at
from syncline.data.source import Batch, ShardSource, Source
from syncline.data.transform import mapped

__all__ = [
    "ArraySource",
    "Batch",
    "IterableSource",
    "ShardSource",
    "Source",
    "batches",
    "fashion_mnist",
    "mapped",
    "mnist",
    "open",
    "read_batches",
    "read_idx",
    "samples_at",
]
