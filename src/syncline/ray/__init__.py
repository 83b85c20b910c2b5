"""Jobs on a Ray cluster from Python: `syncline.ray.run(train_fn, workers=8, servers=2)`.

call   what its workers run
data   Datasets of Ray Data as sources
"""

from __future__ import annotations

import contextlib
import pathlib
import secrets
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from syncline.errors import ConfigError, JobFailed

if TYPE_CHECKING:
    from syncline.data.table import TableSource

__all__ = ["run", "source"]

_CALL = "syncline.ray.call"


def run(
    train_fn: Callable[..., object],
    *,
    workers: int | str = 1,
    servers: int = 1,
    arguments: Mapping[str, Any] | None = None,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float | None = None,
    queue_seconds: float = 0.0,
    data: Mapping[str, Any] | None = None,
    **settings: Any,
) -> str:
    """Runs a function in every worker of a job on Ray, as `syncline run --on ray` runs a script; the job's name.

    `train_fn`: a function of a module or of the program's own file, where workers find it by its name; it calls
    `syncline.init()`. The file is imported in each worker, under another name than `__main__`.
    `arguments`: its keyword arguments, of what JSON knows. No secrets: they are on the workers' command lines.
    `workers`: a number, or the least and the most, "2:16".
    `gpus_per_worker`: one if the cluster has any.
    `queue_seconds`: for the cluster to have room, also for what it does not have now.
    `data`: datasets of `ray.data` by names of your own; workers open them with `syncline.ray.source(name)`.
    `settings`: all others, by their names: `policy="async"`.

    Raises JobFailed if the job fails; what it has printed says why.
    """
    from syncline.cli.ray import run_job_on_ray
    from syncline.engines.ray_cluster import EachWorker, connected
    from syncline.ray.data import kept

    wanted = EachWorker(
        cpus_per_worker=cpus_per_worker, gpus_per_worker=-1.0 if gpus_per_worker is None else gpus_per_worker
    )
    try:
        said = msgspec.json.encode(dict(arguments or {})).decode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"arguments: {error}; they travel as JSON") from None
    where = _where(train_fn)
    with contextlib.ExitStack() as stack:
        blocks = b"{}"
        if data:
            stack.enter_context(connected())
            blocks = msgspec.json.encode(stack.enter_context(kept(data, secrets.token_hex(8))))
        words = [*where, said, blocks.decode()]
        told = {"module": _CALL, "arguments": words, "workers": str(workers), "servers": servers}
        code, name = run_job_on_ray({**settings, **told}, wanted, queue_seconds=queue_seconds)
    if code:
        raise JobFailed(f"the job {name} has failed, with exit code {code}")
    return name


def source(name: str, columns: Sequence[str] | None = None) -> TableSource:
    """In a worker of `run(…, data={name: dataset})`: the dataset, for `syncline.data.batches` and
    `syncline.torch.DataLoader`. Workers share it by leases; each block is read from Ray's object store.
    """
    from syncline.ray import data

    return data.source(name, columns)


def _where(function: Callable[..., object]) -> tuple[str, str]:
    """The module or the file of a function, and its name there."""
    name = getattr(function, "__qualname__", "")
    if not isinstance(function, types.FunctionType) or "<" in name:
        raise ConfigError(
            f"{name or function!r}: workers find the function by its name: define it with def at the top of a file"
        )
    if function.__module__ != "__main__":
        return function.__module__, name
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        raise ConfigError(f"{name}: workers do not see what a notebook or a prompt defines; write it to a file")
    file, here = pathlib.Path(path).absolute(), pathlib.Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file), name
