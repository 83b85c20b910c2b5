"""Datasets of Ray Data as sources: their blocks stay in Ray's object store; workers read those that they lease."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from syncline.data.table import TableSource
from syncline.engines.ray_cluster import last_line, ray_module
from syncline.errors import ConfigError, DataError

#: For Ray to count the rows of a dataset that it has read, for which the cluster needs a free CPU; and to hand over
#: one block, which it may have to compute again.
COUNT_SECONDS, BLOCK_SECONDS = 600.0, 300.0
#: Of the actors that know the blocks.
NAMESPACE = "syncline"


class RayBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker finds a dataset: its cluster, and the actor that knows its blocks."""

    cluster: str
    actor: str


class BlockKeeper:
    """The actor: it knows the blocks of one dataset while the job runs."""

    def __init__(self, schema: bytes, rows: list[int], blocks: list[Any]) -> None:
        self._table_schema, self._rows, self._blocks = schema, rows, blocks

    def about(self) -> tuple[bytes, list[int], list[Any]]:
        return self._table_schema, self._rows, self._blocks


def _rows_of(table: Any) -> tuple[int, bytes]:
    return table.num_rows, table.schema.serialize().to_pybytes()


@contextlib.contextmanager
def kept(data: Mapping[str, Any], job: str) -> Iterator[dict[str, RayBlocks]]:
    """Reads datasets into the object store, and keeps them there for the workers of a job."""
    ray, found, actors = ray_module(), {}, []
    try:
        for name, dataset in data.items():
            if not hasattr(dataset, "to_arrow_refs"):
                raise ConfigError(f"data: {name!r} is {type(dataset).__name__}; give a dataset of ray.data")
            try:
                refs = dataset.to_arrow_refs()
                told = ray.get([ray.remote(_rows_of).remote(ref) for ref in refs], timeout=COUNT_SECONDS)
            except Exception as error:  # of the user's own functions, too
                raise DataError(f"data: {name!r} cannot be read by Ray: {last_line(error)}") from error
            filled = [(rows, ref, schema) for ref, (rows, schema) in zip(refs, told, strict=True) if rows]
            if not filled:
                raise DataError(f"data: {name!r} has no row")
            actor = f"{job}-{name}"
            keeper = ray.remote(BlockKeeper).options(name=actor, namespace=NAMESPACE, num_cpus=0)
            actors.append(keeper.remote(filled[0][2], [rows for rows, _, _ in filled], [ref for _, ref, _ in filled]))
            found[name] = RayBlocks(cluster=str(ray.get_runtime_context().gcs_address), actor=actor)
        yield found
    finally:
        for actor in actors:
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(actor)


#: What this worker's job has, by name.
_here: dict[str, RayBlocks] = {}


def tell(data: Mapping[str, RayBlocks]) -> None:
    """In a worker, before its function runs."""
    _here.update(data)


def source(name: str, columns: Sequence[str] | None = None) -> TableSource:
    """This worker's dataset of that name."""
    where = _here.get(name)
    if where is None:
        there = f"there is {', '.join(_here)}" if _here else "it has none"
        raise ConfigError(f"this job has no data {name!r}, {there}; give it to syncline.ray.run as data=")
    _, rows, _ = _about(where)
    schema = _schema_in(where)
    return TableSource(
        "Ray Data", [_RayBlock(name, where, k, schema, number) for k, number in enumerate(rows)], columns
    )


class _RayBlock:
    """One block of a dataset, as one file of a table."""

    def __init__(self, name: str, where: RayBlocks, index: int, schema: Any, rows: int) -> None:
        self.path = f"Ray Data {name!r}, block {index}"
        self.types = dict(zip(schema.names, schema.types, strict=True))
        self.doubled: frozenset[str] = frozenset()
        self.chunk_sizes: Sequence[int] = (rows,)
        self._where, self._index = where, index

    def read_chunk(self, index: int, columns: list[str]) -> Iterator[Any]:
        _, _, blocks = _about(self._where)
        try:
            table = ray_module().get(blocks[self._index], timeout=BLOCK_SECONDS)
        except Exception as error:
            raise DataError(f"{self.path} is lost: {last_line(error)}") from error
        if missing := [name for name in columns if name not in table.column_names]:
            raise DataError(f"{self.path}: there is no column {missing[0]!r}, which other blocks have")
        yield table.select(columns)


@functools.cache
def _about(where: RayBlocks) -> tuple[bytes, list[int], list[Any]]:
    """What the actor knows. This worker becomes a driver of the cluster for that."""
    ray = ray_module()
    if not ray.is_initialized():
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM)
        ray.init(address=where.cluster, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        if is_main:
            signal.signal(signal.SIGTERM, before)  # Ray takes it; a worker finishes its step, and leaves
    try:
        found: tuple[bytes, list[int], list[Any]] = ray.get(
            ray.get_actor(where.actor, NAMESPACE).about.remote(), timeout=BLOCK_SECONDS
        )
    except Exception as error:
        raise DataError(f"the data of this job cannot be found in Ray: {last_line(error)}") from error
    return found


@functools.cache
def _schema_in(where: RayBlocks) -> Any:
    if "ray.data" not in sys.modules:  # knows Ray's own types of columns
        importlib.import_module("ray.data")
    arrow = importlib.import_module("pyarrow")
    return arrow.ipc.read_schema(arrow.py_buffer(_about(where)[0]))
