"""The coordinator's part in a save, played by a test."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tests.patience import PATIENCE

from syncline.core.checkpoint.manifest import Manifest
from syncline.core.checkpoint.snapshot import SnapshotAttempt
from syncline.core.checkpoint.soundness import checkpoint_name
from syncline.core.layout import Layout
from syncline.core.wire.checkpoints import Mark, SnapshotBarrierClosed, WriteMarked, WrittenMarked
from syncline.core.wire.message import Message
from syncline.net.rpc import Call
from syncline.store import checkpoints
from syncline.store.folders import Folder, open_folder
from syncline.store.tensors import TensorReader

WAIT = PATIENCE
Tell = Callable[[str, Message], Call]


def close_gates(tell: Tell, servers: list[str], number: int = 1, most_turns: int = 8) -> dict[Any, int]:
    """Closes the gates until all servers are level; the clocks at the cut."""
    cut = SnapshotAttempt(number, servers, until=math.inf)
    for _ in range(most_turns):
        calls = {server: tell(server, cut.close()) for server in servers}
        answers = {server: call.wait(WAIT) for server, call in calls.items()}
        if cut.decide({s: a for s, a in answers.items() if isinstance(a, SnapshotBarrierClosed)}, 0.0) == "level":
            return cut.clocks
    raise AssertionError("the servers did not come level")


def mark(tell: Tell, servers: list[str], number: int = 1) -> None:
    for call in [tell(server, Mark(number)) for server in servers]:
        call.wait(WAIT)


def write(tell: Tell, servers: list[str], folder: Folder, number: int = 1) -> list[WrittenMarked]:
    calls = [tell(server, WriteMarked(number, folder.url, f"{server}.safetensors")) for server in servers]
    answers = [call.wait(WAIT) for call in calls]
    assert all(isinstance(answer, WrittenMarked) for answer in answers)
    return answers  # type: ignore[return-value]


def manifest_of(layout: Layout, written: list[WrittenMarked], number: int = 1) -> Manifest:
    return Manifest(
        name=checkpoint_name(number, 0),
        number=number,
        lineage="a" * 32,
        job="job",
        step=0,
        segments=tuple(layout.segments),
        files=tuple(w.file for w in written),
        slices=tuple(sorted((s for w in written for s in w.slices), key=lambda s: s.id)),
    )


def new_folder(path: pathlib.Path, number: int = 1) -> Folder:
    folder = open_folder(str(path)).join(checkpoint_name(number, 0))
    folder.make()
    return folder


def save(
    tell: Tell, servers: list[str], layout: Layout, path: pathlib.Path, number: int = 1
) -> tuple[Folder, Manifest, str, dict[Any, int]]:
    """A whole save: its folder, its manifest, the manifest's digest, and the clocks at the cut."""
    clocks = close_gates(tell, servers, number)
    mark(tell, servers, number)
    folder = new_folder(path, number)
    manifest = manifest_of(layout, write(tell, servers, folder, number), number)
    digest = checkpoints.write_manifest(folder, manifest)
    return folder, manifest, digest, clocks


def saved_values(folder: Folder, manifest: Manifest) -> Mapping[str, np.ndarray[Any, Any]]:
    """Every parameter as it was saved, put together from its slices."""
    readers = {file.name: TensorReader(folder, file) for file in manifest.files}
    saved = {one.id: one for one in manifest.slices}
    found: dict[str, np.ndarray[Any, Any]] = {}
    for segment in manifest.segments:
        flat = np.zeros(segment.num_bytes, np.uint8)
        for part in segment.slices:
            one = saved[part.id]
            flat[part.offset : part.offset + part.num_bytes] = readers[one.file].read(one.tensor)
        for parameter, offset in zip(segment.parameters, segment.offsets, strict=True):
            view = flat[offset : offset + parameter.num_bytes]
            dtype = np.uint16 if parameter.dtype == "bfloat16" else np.dtype(parameter.dtype)
            found[parameter.name] = view.view(dtype).reshape(parameter.shape)
    for reader in readers.values():
        reader.close()
    return found
