"""A checkpoint's weights by the model's names: loaded into memory, or exported for use without Syncline."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from syncline.core.checkpoint import tensor_file
from syncline.core.checkpoint.manifest import Manifest, SavedSlice
from syncline.core.layout import ITEM_BYTES, OWN_PREFIX, Segment, Slice
from syncline.errors import ConfigError, StoreError
from syncline.store.checkpoints import POINTERS, Chosen, candidates, pointed
from syncline.store.disk import PART, create, discard, sync_folder, write_all
from syncline.store.folders import Folder, open_folder
from syncline.store.tensors import TensorReader, in_threads
from syncline.store.trouble import explained

PARAMETERS, AVERAGE = "parameters", "average"
#: The key of a piece's running average in the rule state.
AVERAGE_KEY = "syncline.average"
#: The prefix of parameters without an optimizer.
_FIXED = "fixed."
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter with the model's name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return tensor_file.num_bytes_of(self.dtype, self.shape, repr(self.name))


def check_shapes(
    given: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], *, needed: Set[str], model: str
) -> None:
    """StoreError: saved weights of these shapes do not fit a model that wants the others. It can do without those
    that are not needed. `model`: what the message calls it.
    """
    if missing := needed - given.keys() or given.keys() - wanted.keys():
        side = model if min(missing) not in wanted else "checkpoint"
        raise StoreError(f"the {side} has no {min(missing)!r}; serve the model that was trained")
    for name, shape in given.items():
        if list(wanted[name]) != list(shape):
            raise StoreError(f"{name!r} has shape {list(shape)}, the model's {list(wanted[name])}")


@dataclasses.dataclass(frozen=True)
class _Run:
    """Bytes of a tensor and their offset in a weight; None: not needed."""

    weight: str | None
    begin: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class _Source:
    """A tensor of a file with needed data."""

    file: str
    tensor: str
    runs: tuple[_Run, ...]


class Weights:
    """The weights of one checkpoint. Every tensor's digest is verified before its data is returned."""

    def __init__(self, chosen: Chosen, names: Collection[str] | None = None, weights: str = PARAMETERS) -> None:
        """`names`: only these; `weights`: the parameters, or their average if there is one."""
        if weights not in (PARAMETERS, AVERAGE):
            raise ConfigError(f"weights = {weights!r}: must be one of {PARAMETERS!r} and {AVERAGE!r}")
        self.chosen = chosen
        self._own = own_names(chosen.manifest)
        if names is not None and (unknown := set(names) - set(self._own.values())):
            known = ", ".join(list(self._own.values())[:10])
            raise ConfigError(f"{chosen.folder.url} has no {min(unknown)!r}; it has {known}, …")
        self._wanted = set(self._own.values()) if names is None else set(names)
        self._averages = _averages(chosen, self._own) if weights == AVERAGE else {}
        self._sources = list(self._find_sources())
        self._num_bytes = sum(run.num_bytes for source in self._sources for run in source.runs)

    def plan(self) -> list[Weight]:
        """The weights in order of registration."""
        found = []
        for segment in self.chosen.manifest.segments:
            for parameter in segment.parameters:
                name = self._own.get(parameter.name)
                if name is not None and name in self._wanted:
                    found.append(Weight(name, self._averages.get(name, parameter.dtype), parameter.shape))
        return found

    def read(self) -> dict[str, tuple[Weight, npt.NDArray[np.uint8]]]:
        """All of them, each in new memory."""

        def read(source: _Source) -> None:
            rest = np.empty(sum(run.num_bytes for run in source.runs if run.weight is None), np.uint8)
            views, begin = [], 0
            for run in source.runs:
                if run.weight is None:
                    views.append(rest[begin : begin + run.num_bytes].data)
                    begin += run.num_bytes
                else:
                    views.append(found[run.weight][1][run.begin : run.begin + run.num_bytes].data)
            readers[source.file].read_into(source.tensor, views)

        with self._readers() as readers, self._fitting():
            found = {weight.name: (weight, np.empty(weight.num_bytes, np.uint8)) for weight in self.plan()}
            in_threads(read, self._sources, self._num_bytes)
        return found

    def export(self, path: pathlib.Path) -> None:
        """Writes one safetensors file, slice by slice; atomic."""
        plan = self.plan()
        header, entries = tensor_file.plan([(w.name, w.dtype, w.shape) for w in plan], {"format": "pt"})
        begins = {entry.name: len(header) + entry.begin for entry in entries}
        with replaced(path) as part:
            descriptor = create(part)
            try:
                write_all(descriptor, memoryview(header), 0)

                def copy(source: _Source) -> None:
                    data, begin = memoryview(readers[source.file].read(source.tensor).data), 0
                    for run in source.runs:
                        if run.weight is not None:
                            write_all(descriptor, data[begin : begin + run.num_bytes], begins[run.weight] + run.begin)
                        begin += run.num_bytes

                with self._readers() as readers, self._fitting():
                    in_threads(copy, self._sources, self._num_bytes)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except MemoryError as error:
            raise StoreError(f"{self.chosen.folder.url} does not fit into memory; name fewer weights") from error

    @contextlib.contextmanager
    def _readers(self) -> Iterator[dict[str, TensorReader]]:
        """Readers of all files, checked against the manifest before memory is allocated."""
        files = {file.name: TensorReader(self.chosen.folder, file) for file in self.chosen.manifest.files}
        try:
            for reader in files.values():
                reader.check()
            yield files
        finally:
            for reader in files.values():
                reader.close()

    def _find_sources(self) -> Iterator[_Source]:
        saved = {one.id: one for one in self.chosen.manifest.slices}
        for segment in self.chosen.manifest.segments:
            for part in segment.slices:
                yield from self._sources_of(segment, part, saved[part.id])

    def _sources_of(self, segment: Segment, part: Slice, saved: SavedSlice) -> Iterator[_Source]:
        tensors = {(state.piece, state.key): state.tensor for state in saved.states}
        runs: list[_Run] = []
        end = 0
        for index, piece in enumerate(segment.pieces(part)):
            parameter = segment.parameters[piece.parameter]
            name = self._own.get(parameter.name)
            if name is None or name not in self._wanted:
                continue
            if name in self._averages:
                size = tensor_file.ITEM_SIZES[self._averages[name]]
                whole = _Run(name, piece.start * size, piece.num_items * size)
                yield _Source(saved.file, tensors[index, AVERAGE_KEY], (whole,))
                continue
            size = ITEM_BYTES[parameter.dtype]
            if piece.offset > end:
                runs.append(_Run(None, 0, piece.offset - end))
            runs.append(_Run(name, piece.start * size, piece.num_items * size))
            end = piece.offset + piece.num_items * size
        if runs:
            if part.num_bytes > end:
                runs.append(_Run(None, 0, part.num_bytes - end))
            yield _Source(saved.file, saved.tensor, tuple(runs))


def load(
    url: str | os.PathLike[str], names: Collection[str] | None = None, weights: str = ""
) -> dict[str, tuple[Weight, npt.NDArray[np.uint8]]]:
    """Loads the weights of a checkpoint, or of the newest readable one in a folder. By default those that `best`
    means, else the parameters.
    """
    return _first(url, names, weights, Weights.read)


def export(url: str | os.PathLike[str], path: pathlib.Path, weights: str = "") -> str:
    """Like `load`, into one safetensors file; returns the location of the checkpoint."""

    def to_file(found: Weights) -> str:
        found.export(path)
        return found.chosen.folder.url

    return _first(url, None, weights, to_file)


def _first(
    url: str | os.PathLike[str], names: Collection[str] | None, weights: str, use: Callable[[Weights], _Result]
) -> _Result:
    """Uses the first checkpoint that works; others are skipped with a warning."""
    reasons: list[str] = []
    folder = open_folder(url)
    weights = weights or _meant(folder)
    for chosen in _ordered(folder, reasons.append):
        found = Weights(chosen, names, weights)
        try:
            result = use(found)
        except StoreError as error:
            reasons.append(f"{chosen.folder.url} is skipped: {error}")
            continue
        for reason in reasons:
            warnings.warn(reason, RuntimeWarning, stacklevel=4)
        return result
    raise StoreError(
        f"{os.fspath(url)} holds no checkpoint that can be read{''.join(f'; {reason}' for reason in reasons[:3])}; "
        "name a checkpoint's folder or a folder of such (`syncline checkpoint ls`)"
    )


def _meant(folder: Folder) -> str:
    """Which weights of a checkpoint a pointer means."""
    fact = pointed(folder.parent(), folder.name) if folder.name in POINTERS else None
    return AVERAGE if fact is not None and fact.get("weights") == AVERAGE else PARAMETERS


def _ordered(folder: Folder, say: Callable[[str], None]) -> Iterator[Chosen]:
    """The checkpoints to try: complete ones first, then weights-only ones."""
    others = []
    for chosen in candidates(folder, say):
        if chosen.manifest.kind == "whole":
            yield chosen
        else:
            others.append(chosen)
    yield from others


def own_names(manifest: Manifest) -> dict[str, str]:
    """The model's name of each parameter of a checkpoint."""
    return names_of(manifest.segments)


def names_of(segments: Iterable[Segment]) -> dict[str, str]:
    """The model's name of each parameter. Parameters without an optimizer are registered under another name.

    What Syncline has registered for itself is left out.
    """
    rules = {p.name: segment.rule_of(p).name for segment in segments for p in segment.parameters}
    found = {}
    for name, rule in rules.items():
        if name.startswith(OWN_PREFIX):
            continue
        own = name.removeprefix(_FIXED)
        found[name] = own if rule == "Assign" and own not in rules else name
    return found


@contextlib.contextmanager
def replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary file that replaces `path` on success; it must be synced by then."""
    part = path.with_name(path.name + PART)
    with explained(str(path), "cannot be written"):
        try:
            yield part
            os.rename(part, path)
            sync_folder(path.parent)
        except BaseException:
            discard(part)
            raise


def _averages(chosen: Chosen, own: dict[str, str]) -> dict[str, str]:
    """The dtype of each average; StoreError if the checkpoint has none."""
    manifest = chosen.manifest
    tensors = {(file.name, tensor.name): tensor for file in manifest.files for tensor in file.tensors}
    saved = {one.id: one for one in manifest.slices}
    found: dict[str, str] = {}
    lacking: set[str] = set()
    for segment in manifest.segments:
        for part in segment.slices:
            kept = {state.piece: state.tensor for state in saved[part.id].states if state.key == AVERAGE_KEY}
            for index, piece in enumerate(segment.pieces(part)):
                name = own.get(segment.parameters[piece.parameter].name)
                if name is None:
                    continue
                tensor = tensors.get((saved[part.id].file, kept.get(index, "")))
                if tensor is None or math.prod(tensor.shape) != piece.num_items:
                    lacking.add(name)
                elif found.setdefault(name, tensor.dtype) != tensor.dtype:
                    raise StoreError(f"{chosen.folder.url} is damaged: the average of {name!r} has two types")
    found = {name: dtype for name, dtype in found.items() if name not in lacking}
    if not found:
        raise StoreError(f"{chosen.folder.url} has no average; it is kept by jobs with --average ema:DECAY")
    return found
