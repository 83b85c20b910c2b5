"""Syncline trains one model on many processes: parameters on servers, the same script on a laptop or a cluster.

errors, config, stats      the ground: what is raised, what can be set, what is counted
extensions, faults         the user's own code by name; points where tests end a process
usage, gpus                what a process uses of its machine; how busy its GPUs are
core/                      pure: messages, layout, placement, policy, rounds, membership, liveness, order, splits
net/                       frames, sockets, shared memory, the in-process twin, calls
store/                     what outlives a process: the coordinator's journal, checkpoints
worker/  server/  coordinator/      the three roles, each inside its process
collectives                what workers do together
torch/   jax/   data/      thin adapters, data sets
launch/                    init(), local processes, other hosts
page/  sinks/              what a job does, in a browser; its metrics in TensorBoard and MLflow
serve/                     a trained model answers requests
testing/                   whole jobs inside one process
bench/                     `syncline bench`: this machine against its floors
cli/                       the command line
"""

from __future__ import annotations

import importlib
import os
import typing
from collections.abc import Collection

from syncline.errors import (
    CollectiveError,
    ConfigError,
    ConnectionLost,
    DataError,
    FencedError,
    FrameError,
    JobFailed,
    LayoutError,
    ProtocolError,
    RuleError,
    Stopped,
    StoreError,
    SynclineError,
    TokenError,
    VersionError,
    WaitTimeout,
)

if typing.TYPE_CHECKING:
    import torch

    from syncline.core.codecs.codec import Codec
    from syncline.core.media import Histogram, Image, Text
    from syncline.core.rule import Rule
    from syncline.launch.start import init
    from syncline.worker.checkpoint.rng_state import seed_everything
    from syncline.worker.current import current_job
    from syncline.worker.job import Job

__version__ = "0.1.0"
__all__ = [
    "Codec",
    "CollectiveError",
    "ConfigError",
    "ConnectionLost",
    "DataError",
    "FencedError",
    "FrameError",
    "Histogram",
    "Image",
    "Job",
    "JobFailed",
    "LayoutError",
    "ProtocolError",
    "Rule",
    "RuleError",
    "Stopped",
    "StoreError",
    "SynclineError",
    "Text",
    "TokenError",
    "VersionError",
    "WaitTimeout",
    "__version__",
    "current_job",
    "init",
    "load_state_dict",
    "seed_everything",
]

#: Imported when they are first used: the command line, and scripts that only ask for the version, start at once.
_LATER = {
    "Codec": "syncline.core.codecs.codec",
    "Histogram": "syncline.core.media",
    "Image": "syncline.core.media",
    "Job": "syncline.worker.job",
    "Rule": "syncline.core.rule",
    "Text": "syncline.core.media",
    "current_job": "syncline.worker.current",
    "init": "syncline.launch.start",
    "seed_everything": "syncline.worker.checkpoint.rng_state",
}
_MODULES = frozenset({"config", "core", "extensions", "faults", "launch", "net", "ray", "stats", "store", "worker"})


def __getattr__(name: str) -> typing.Any:
    if name in _LATER:
        found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return found
    if name in _MODULES:
        return importlib.import_module(f"syncline.{name}")
    raise AttributeError(f"module 'syncline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def load_state_dict(
    url: str | os.PathLike[str],
    names: Collection[str] | None = None,
    dtype: torch.dtype | str | None = None,
    weights: str = "",
) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint as a plain state_dict; it takes no job.

    `url`: a checkpoint's folder, or a folder of checkpoints (the newest that can be read), or its `best` or `last`;
    any path that fsspec knows. `names`: only these. `dtype`: what is a floating number becomes this. `weights`:
    "parameters", or "average" for the average that `--average ema:DECAY` keeps; else what `best` means. What is
    damaged is never returned: StoreError.
    """
    from syncline.torch.weights import load_state_dict as load  # torch only where it is needed

    return load(url, names, dtype, weights)
