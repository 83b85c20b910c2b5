"""With local steps: a worker's own model, as it was before it was averaged, is a candidate for the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from syncline.core.layout import ITEM_BYTES, Segment, Slice
from syncline.core.wire.validation import WriteCandidate, WrittenCandidate
from syncline.errors import StoreError, SynclineError
from syncline.net.rpc import Request
from syncline.store.averaging import plan_of
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorWriter
from syncline.worker import arrays
from syncline.worker.arrays import Array, Bytes

if TYPE_CHECKING:
    from syncline.worker.job import Job


class HasOwn(Protocol):
    """A model of which a copy can be kept."""

    def note_own(self) -> None: ...
    def own(self) -> dict[str, Array]: ...


class OwnModel:
    """Noted at every averaging; of the validation that was last, kept until it is known whether it is the best."""

    def __init__(self, job: Job) -> None:
        self._job = job
        config = job.config
        self.is_wanted = config.sync_every > 1 and bool(config.best and config.checkpoint)
        self._kept: tuple[int, dict[str, Array]] = (0, {})

    def keep(self, turn: int, models: list[HasOwn]) -> None:
        """What is validated now may be asked for: with it what all workers have in common."""
        found: dict[str, Array] = {}
        for model in models:
            found |= model.own()
        others = [name for name in self._job.exchange.layout.where if name not in found]
        self._kept = (turn, {**found, **(self._job.kv.pull(others) if others else {})})

    def write(self, request: Request) -> None:
        """In a thread of its own."""
        message = request.message
        assert isinstance(message, WriteCandidate)
        try:
            turn, values = self._kept
            if turn != message.turn:
                raise StoreError(f"{self._job.name} has its own model of validation {turn}, not of {message.turn}")
            request.reply(self._write(message, values))
        except SynclineError as error:
            request.refuse(error)
        except Exception as error:  # a disk that is full, or a bug: the coordinator waits for an answer
            request.refuse(StoreError(f"{self._job.name}: {error}"))

    def _write(self, message: WriteCandidate, values: dict[str, Array]) -> WrittenCandidate:
        segments = list(self._job.exchange.layout.segments)
        writer = TensorWriter(open_folder(message.folder), message.file, plan_of(segments))
        try:
            for segment in segments:
                for part in segment.slices:
                    writer.write(f"slice-{part.id}", _slice_of(segment, part, values))
        except BaseException:
            writer.abandon()
            raise
        return WrittenCandidate(writer.finish())


def _slice_of(segment: Segment, part: Slice, values: dict[str, Array]) -> Bytes:
    found, size = np.zeros(part.num_bytes, np.uint8), ITEM_BYTES[part.dtype]
    for piece in segment.pieces(part):
        data = arrays.to_bytes(values[segment.parameters[piece.parameter].name])
        begin = piece.start * size
        found[piece.offset : piece.offset + piece.num_items * size] = data[begin : begin + piece.num_items * size]
    return found
