"""The manifest: the file that completes a checkpoint. Lists tensors, slices, files, samples and settings."""

from __future__ import annotations

from typing import Any

import msgspec

from syncline.core.layout import Segment
from syncline.core.leasing.leases import LeaseState

#: Incremented when an older reader would misread it.
FORMAT = 2


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a file: where its bytes lie behind the header, and their digest (XXH3, 128 bits)."""

    name: str
    dtype: str  # by our names: float32, bfloat16, …
    shape: tuple[int, ...]
    begin: int
    end: int
    digest: str


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One safetensors file, written by one member."""

    name: str
    num_bytes: int
    header_digest: str  # of everything before the tensors' bytes
    tensors: tuple[SavedTensor, ...]


class SavedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a rule's state for one piece of a slice."""

    piece: int
    key: str
    tensor: str


class SavedSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A slice: the tensor with its parameters, its rules' state, its version and its clocks."""

    id: int
    file: str
    tensor: str
    version: int
    clocks: tuple[tuple[str, int, int], ...] = ()  # name, incarnation, clock
    states: tuple[SavedState, ...] = ()


class SavedScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's script: its random states and what it gave as `job.state`."""

    worker: str
    clock: int
    file: SavedFile


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a checkpoint says of itself."""

    format: int = FORMAT
    name: str  # of its folder
    number: int  # grows from one checkpoint of a folder to the next
    lineage: str  # drawn when a job begins; a resumed job keeps it
    job: str
    step: int
    seconds: float = 0.0  # training time of the lineage so far
    saved_at: float = 0.0  # wall clock
    syncline: str = ""
    torch: str = ""
    kind: str = "whole"  # "weights": parameters only; a job does not resume from it by itself
    segments: tuple[Segment, ...] = ()
    files: tuple[SavedFile, ...] = ()
    slices: tuple[SavedSlice, ...] = ()
    scripts: tuple[SavedScript, ...] = ()
    leases: LeaseState = msgspec.field(default_factory=LeaseState)
    metrics: dict[str, float] = {}
    steering: dict[str, Any] = {}  # the state of the stop rules
    config: dict[str, Any] = {}
