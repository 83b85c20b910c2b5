"""Rows about checkpoints: one saved and loaded, beside torch's own ways, on the same disk."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import pathlib
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.match import take_pairs
from benchmarks.row import Effort, Reach, Row, Samples
from benchmarks.words import MIB
from syncline.core.checkpoint.manifest import Manifest, SavedSlice
from syncline.core.checkpoint.soundness import checkpoint_name, slice_tensor
from syncline.core.layout import Parameter, Segment, arrange, place
from syncline.core.rule import Rule
from syncline.store import checkpoints
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorWriter, in_threads

_NUM_PARAMETERS = 32
_FILE = "server-0.safetensors"
_SAVED = "the faster of DCP's async_save and of torch.save, fsync, sha256"
_LOADED = "the faster of DCP's load, which checks nothing, and of sha256, bare bytes"

#: Saves to a path, or loads from it.
Way = Callable[[pathlib.Path], object]


@dataclasses.dataclass(frozen=True)
class Ways:
    """One side's save and load of the same numbers."""

    save: Way
    load: Way


def checkpoint(name: str, num_bytes: int, *, load: bool, reach: Reach) -> Row:
    """One checkpoint of so many bytes; ours is loaded as a state_dict, every digest checked."""

    def measure(effort: Effort) -> Samples:
        ours, references = _ours(num_bytes), (_dcp(num_bytes), _plain(num_bytes))
        with tempfile.TemporaryDirectory(prefix="syncline-") as text, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own arguments
            folder = pathlib.Path(text)

            def take(side: str) -> float:
                sides = (ours,) if side == "ours" else references
                return min(_timed(ways, folder / "one", load) for ways in sides)

            take("ours"), take("reference")  # imports, and the first touch of everything
            return take_pairs(take, effort, time.monotonic())

    verb = "loaded, from the page cache" if load else "saved, on the disk"
    what = f"a checkpoint of {num_bytes // MIB} MiB {verb}"
    return Row(name=name, what=what, reference=_LOADED if load else _SAVED, reach=reach, measure=measure)


def _timed(ways: Ways, path: pathlib.Path, load: bool) -> float:
    path.mkdir()
    try:
        began = time.perf_counter()
        ways.save(path)
        if load:
            began = time.perf_counter()
            ways.load(path)
        return time.perf_counter() - began
    finally:
        shutil.rmtree(path)


def _shapes(num_bytes: int) -> list[Parameter]:
    items = num_bytes // 4 // _NUM_PARAMETERS
    return [Parameter(f"layer{k}.weight", "float32", (items,)) for k in range(_NUM_PARAMETERS)]


def _ours(num_bytes: int) -> Ways:
    plain = arrange(_shapes(num_bytes), [Rule("SGD", lr=0.1)], "mean")
    segment, _ = place(plain, ["server-0"], {}, 4 * MIB, 0)
    flat = np.random.default_rng(0).random(segment.num_bytes // 4, np.float32).view(np.uint8)

    def load(path: pathlib.Path) -> object:
        return importlib.import_module("syncline.torch.weights").load_state_dict(path)

    return Ways(lambda path: _save(path, segment, flat), load)


def _save(path: pathlib.Path, segment: Segment, flat: Any) -> None:
    own = checkpoints.begin(open_folder(path), 1, 1, "bench")
    plan = [(slice_tensor(part.id), part.dtype, (part.num_bytes // 4,)) for part in segment.slices]
    writer = TensorWriter(own, _FILE, plan)
    in_threads(
        lambda part: writer.write(slice_tensor(part.id), flat[part.offset : part.offset + part.num_bytes]),
        segment.slices,
    )
    manifest = Manifest(
        name=checkpoint_name(1, 1),
        number=1,
        lineage="bench",
        job="bench",
        step=1,
        segments=(segment,),
        slices=tuple(SavedSlice(part.id, _FILE, slice_tensor(part.id), 1) for part in segment.slices),
    )
    checkpoints.write_manifest(own, msgspec.structs.replace(manifest, files=(writer.finish(),)))


def _tensors(num_bytes: int) -> dict[str, Any]:
    import torch

    return {parameter.name: torch.rand(parameter.shape) for parameter in _shapes(num_bytes)}


def _dcp(num_bytes: int) -> Ways:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    state = _tensors(num_bytes)

    def save(path: pathlib.Path) -> None:
        dcp.async_save(state, checkpoint_id=str(path / "dcp")).result()

    def load(path: pathlib.Path) -> None:
        import torch

        dcp.load({name: torch.empty_like(tensor) for name, tensor in state.items()}, checkpoint_id=str(path / "dcp"))

    return Ways(save, load)


def _plain(num_bytes: int) -> Ways:
    """As one would do it by hand; loaded as bytes only, since nothing of ours calls torch's reader of pickles."""
    import torch

    state = _tensors(num_bytes)

    def save(path: pathlib.Path) -> None:
        with open(path / "plain.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _digest(path / "plain.pt")

    def load(path: pathlib.Path) -> None:
        _digest(path / "plain.pt")
        (path / "plain.pt").read_bytes()

    return Ways(save, load)


def _digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
