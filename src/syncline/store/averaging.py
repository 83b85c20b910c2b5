"""`--average last:N`: the mean of the parameters of several checkpoints, as a weights-only checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from syncline.core.checkpoint.manifest import Manifest, SavedFile, SavedSlice
from syncline.core.checkpoint.soundness import checkpoint_name
from syncline.core.layout import INTEGERS, ITEM_BYTES, Segment, Slice
from syncline.store import checkpoints
from syncline.store.checkpoints import Chosen, Found
from syncline.store.folders import Folder
from syncline.store.tensors import TensorReader, TensorWriter

#: The only file of a weights-only checkpoint.
WEIGHTS_FILE = "weights.safetensors"
Bytes = npt.NDArray[np.uint8]


def last(folder: Folder, count: int, lineage: str) -> list[Chosen]:
    """The newest checkpoints of a lineage with the same slices, newest first; fewer if some are missing."""
    found: list[Chosen] = []
    for one in checkpoints.find(folder):
        if _counts(one, lineage) and one.manifest is not None:
            if found and one.manifest.segments != found[0].manifest.segments:
                break
            found.append(Chosen(folder.join(one.name), one.manifest, one.digest))
        if len(found) == count:
            break
    return found


def _counts(one: Found, lineage: str) -> bool:
    return one.manifest is not None and one.manifest.kind == "whole" and one.manifest.lineage == lineage


def write_mean(root: Folder, chosen: Sequence[Chosen]) -> Manifest:
    """Writes the mean, slice by slice. Parameters without gradient rules are those of the newest."""
    newest = chosen[0].manifest
    number = checkpoints.next_number(root)
    folder = checkpoints.begin(root, number, newest.step, newest.lineage)
    try:
        return _write(folder, number, chosen)
    except BaseException:
        folder.remove_all()
        raise


def _write(folder: Folder, number: int, chosen: Sequence[Chosen]) -> Manifest:
    newest = chosen[0].manifest
    parts = [(segment, part) for segment in newest.segments for part in segment.slices]
    writer = TensorWriter(folder, WEIGHTS_FILE, plan_of(newest.segments))
    try:
        with _Slices(chosen) as slices:
            for segment, part in parts:
                writer.write(
                    f"slice-{part.id}", _mean(segment, part, [slices.read(k, part) for k in range(len(chosen))])
                )
    except BaseException:
        writer.abandon()
        raise
    manifest = weights_only(newest, number, writer.finish(), {})
    checkpoints.write_manifest(folder, manifest)
    return manifest


def weights_only(whole: Manifest, number: int, file: SavedFile, metrics: dict[str, float]) -> Manifest:
    """The manifest of a weights-only checkpoint with these weights in one file."""
    return msgspec.structs.replace(
        whole,
        name=checkpoint_name(number, whole.step),
        number=number,
        kind="weights",
        files=(file,),
        slices=tuple(SavedSlice(one.id, file.name, f"slice-{one.id}", one.version) for one in whole.slices),
        scripts=(),
        metrics=metrics,
    )


def plan_of(segments: Sequence[Segment]) -> list[tuple[str, str, tuple[int, ...]]]:
    """The tensors of its file."""
    parts = [part for segment in segments for part in segment.slices]
    return [(f"slice-{part.id}", part.dtype, (part.num_bytes // ITEM_BYTES[part.dtype],)) for part in parts]


class _Slices:
    """The slices of several checkpoints."""

    def __init__(self, chosen: Sequence[Chosen]) -> None:
        self._saved = [{one.id: one for one in each.manifest.slices} for each in chosen]
        self._readers = [
            {file.name: TensorReader(each.folder, file) for file in each.manifest.files} for each in chosen
        ]

    def read(self, index: int, part: Slice) -> Bytes:
        saved = self._saved[index][part.id]
        return self._readers[index][saved.file].read(saved.tensor)

    def __enter__(self) -> _Slices:
        return self

    def __exit__(self, *_: object) -> None:
        for readers in self._readers:
            for reader in readers.values():
                reader.close()


def _mean(segment: Segment, part: Slice, values: Sequence[Bytes]) -> Bytes:
    result = values[0].copy()
    if part.dtype in INTEGERS:
        return result
    size = ITEM_BYTES[part.dtype]
    for piece in segment.pieces(part):
        if segment.rule_of(segment.parameters[piece.parameter]).name == "Assign":
            continue
        at = slice(piece.offset, piece.offset + piece.num_items * size)
        total = sum((wide(value[at], part.dtype) for value in values[1:]), wide(values[0][at], part.dtype))
        result[at] = narrow(total / len(values), part.dtype)
    return result


def wide(data: Bytes, dtype: str) -> npt.NDArray[np.float64]:
    """Double-precision numbers; bfloat16, which NumPy lacks, is the upper half of a float32."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(dtype).astype(np.float64)


def narrow(values: npt.NDArray[np.float64], dtype: str) -> Bytes:
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)
