"""The manifest: the file that makes a checkpoint exist. Of tensors, slices, files, samples and settings."""

from __future__ import annotations

from typing import Any

import msgspec

from syncline.core.layout import Segment
from syncline.core.leasing.leases import LeaseState

#: Grows when a reader of the format before would misread it.
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
    lineage: str  # drawn when a job begins; one that is taken up goes on with it
    job: str
    step: int
    seconds: float = 0.0  # that the lineage has trained so far
    saved_at: float = 0.0  # by the clock of the wall
    syncline: str = ""
    torch: str = ""
    kind: str = "whole"  # weights: parameters only, of which no job goes on by itself
    segments: tuple[Segment, ...] = ()
    files: tuple[SavedFile, ...] = ()
    slices: tuple[SavedSlice, ...] = ()
    scripts: tuple[SavedScript, ...] = ()
    leases: LeaseState = msgspec.field(default_factory=LeaseState)
    metrics: dict[str, float] = {}
    steering: dict[str, Any] = {}  # what the stop rules remember
    config: dict[str, Any] = {}
