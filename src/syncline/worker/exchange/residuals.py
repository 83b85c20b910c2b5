"""Encodes a worker's pushes. What an encoding leaves out, the residual, is added to the next push.

A residual changes with the commit, and only if the commit counts: after a void, skipped or late push it is restored.
A committed push is kept encoded, so that a replay sends the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from syncline.core.codecs.codec import Floats
from syncline.core.codecs.named import Codecs
from syncline.core.codecs.pieces import NOT_SENT, Encoded, PiecePlace, SliceCoder, Unit, coder_of
from syncline.core.layout import Layout, Parameter, Ranges, Segment, Slice, in_ranges
from syncline.errors import StoreError
from syncline.worker.arrays import Bytes
from syncline.worker.checkpoint.script_state import Part, ScriptState


class _Pending(NamedTuple):
    """An encoded slice of the next push, its residual, and which parameters it contains."""

    part: Slice
    encoded: Encoded
    residual: Floats | None
    has: set[PiecePlace]


def encoder_of(
    codecs: Codecs, layout: Layout, *, checks_finite: bool, forget_staged: Callable[[], None]
) -> PushEncoder | None:
    """The encoder of a job with a codec."""
    coder = coder_of(codecs.push, codecs)
    if coder is None:
        return None
    return PushEncoder(coder, layout, checks_finite=checks_finite, forget_staged=forget_staged)


class PushEncoder:
    """Encodes one worker's pushes. Belongs to the thread that uses the exchange."""

    def __init__(
        self, coder: SliceCoder, layout: Layout, *, checks_finite: bool, forget_staged: Callable[[], None]
    ) -> None:
        """`forget_staged`: discards what was staged early; it calls `forget`."""
        self.coder, self._layout, self._checks_finite = coder, layout, checks_finite
        self._forget_staged = forget_staged
        self._pending: dict[int, _Pending] = {}  # by slice, like all that follows
        self._residuals: dict[int, Floats] = {}
        self._parts: dict[int, Slice] = {}  # that have residuals
        self._before: dict[int, Floats] = {}  # before the last commit; or memory for the next ones
        self._saved: Mapping[str, Floats] = {}  # by parameter: from a checkpoint, until slices have theirs

    # -- the next push ------------------------------------------------------------------------------------

    def encode(self, part: Slice, data: Bytes, pushed: Ranges | None) -> Encoded | None:
        """Encodes a slice of the arena; None if it is sent unencoded. `pushed`: None if all of it is filled."""
        segment = self._layout.segments[part.segment]
        if not self.coder.encodes(segment, part):
            return None
        residual = self._room(part) if self.coder.codec.is_lossy else None
        has = self._pushed(segment, part, pushed)
        encoded = Encoded([], [])
        for unit in self.coder.units(segment, part):
            if has.isdisjoint(unit.places):
                encoded.sizes.append(NOT_SENT)
            elif unit.is_encoded:
                self.coder.add(encoded, self._encode(part, unit, has, data.view(np.float32), residual))
            else:
                self.coder.add(encoded, data[unit.places[0].begin : unit.places[0].end].copy())
        self._pending[part.id] = _Pending(part, encoded, residual, has)
        return encoded

    def _pushed(self, segment: Segment, part: Slice, pushed: Ranges | None) -> set[PiecePlace]:
        places = (place for unit in self.coder.units(segment, part) for place in unit.places)
        first = segment.first_parameter
        return {place for place in places if pushed is None or in_ranges(pushed, first + place.parameter)}

    def _encode(
        self, part: Slice, unit: Unit, has: Collection[PiecePlace], values: Floats, residual: Floats | None
    ) -> Bytes:
        """Encodes a unit. Parameters outside `has` count as zeros."""
        before = self._residuals.get(part.id) if residual is not None else None
        total = np.empty(unit.num_bytes // 4, np.float32)
        for place, target in unit.spread(total):
            if place not in has:
                target.fill(0)
            elif before is None:
                target[:] = values[place.items]
            else:
                np.add(values[place.items], before[place.items], out=target)
        found = self.coder.encoded(self._layout.segments[part.segment], unit, total)
        if residual is not None:
            self._leave_out(unit, total, found, residual)
        return found

    def _leave_out(self, unit: Unit, total: Floats, encoding: Bytes, residual: Floats) -> None:
        """The residual is the total minus what the receiver decodes."""
        with np.errstate(all="ignore"):
            total -= self.coder.decoded(encoding, unit)
        if not self._checks_finite and not np.isfinite(total).all():
            np.nan_to_num(total, copy=False, nan=0.0, posinf=0.0, neginf=0.0)  # otherwise every later push is spoilt
        for place, left in unit.spread(total):
            residual[place.items] = left

    def _room(self, part: Slice) -> Floats:
        """Memory for this push's residual, initialized with the earlier residual."""
        if part.id not in self._residuals and self._saved:
            self._residuals[part.id], self._parts[part.id] = self._from_saved(part), part
        pending = self._pending.pop(part.id, None)
        if pending is not None and pending.residual is not None:
            return pending.residual
        known = self._before.pop(part.id, None)
        return known if known is not None else np.empty(part.num_bytes // 4, np.float32)

    def forget(self, number: int | None = None) -> None:
        """Discards the encoding of this slice, or of all slices."""
        for key in [number] if number is not None else list(self._pending):
            pending = self._pending.pop(key, None)
            if pending is not None and pending.residual is not None:
                self._before.setdefault(key, pending.residual)

    def commit(self, pushed: Ranges) -> dict[int, Encoded]:
        """The push is committed: its residuals become current. Returns everything that was encoded for it."""
        found = {}
        for number, (part, encoded, residual, has) in list(self._pending.items()):
            segment = self._layout.segments[part.segment]
            counts = has & self._pushed(segment, part, pushed)
            if not counts:
                self.forget(number)
                continue
            found[number] = encoded
            if residual is not None:
                self._adopt(part, residual, self._pushed(segment, part, None) - counts)
        self._pending.clear()
        return found

    def _adopt(self, part: Slice, residual: Floats, others: Collection[PiecePlace]) -> None:
        """`others`: the parameters that the push does not contain."""
        number = part.id
        self._parts[number] = part
        before = self._residuals.get(number)
        if before is None:
            before = np.zeros(residual.size, np.float32)
        for place in others:
            residual[place.items] = before[place.items]
        self._residuals[number], self._before[number] = residual, before

    def take_back(self, encoded: Mapping[int, Encoded]) -> None:
        """The last push did not count: restores the residuals from before it."""
        for number in encoded:
            if number in self._before and number in self._residuals:
                before = self._before[number]
                self._residuals[number], self._before[number] = before, self._residuals[number]

    # -- checkpoints --------------------------------------------------------------------------------------

    def take(self) -> dict[str, Floats]:
        """Copies of the residuals by parameter; parameters without any are left out."""
        found: dict[str, Floats] = {}
        for number, residual in self._residuals.items():
            for parameter, place in self._encoded_places(self._parts[number]):
                values = residual[place.items]
                if values.any():
                    whole = found.setdefault(parameter.name, np.zeros(parameter.num_items, np.float32))
                    whole[place.start : place.start + values.size] = values
        return found

    def put_back(self, saved: Mapping[str, Floats]) -> None:
        """Sets the residuals before the first push. Slices staged without them are encoded again."""
        self._forget_staged()
        self._residuals.clear()
        self._before.clear()
        self._saved = saved

    def _from_saved(self, part: Slice) -> Floats:
        found = np.zeros(part.num_bytes // 4, np.float32)
        for parameter, place in self._encoded_places(part):
            values = self._saved.get(parameter.name)
            if values is not None and values.shape == (parameter.num_items,) and values.dtype == np.float32:
                target = found[place.items]
                target[:] = values[place.start : place.start + target.size]
        return found

    def _encoded_places(self, part: Slice) -> Iterator[tuple[Parameter, PiecePlace]]:
        segment = self._layout.segments[part.segment]
        for unit in self.coder.units(segment, part):
            if unit.is_encoded:
                yield from ((segment.parameters[place.parameter], place) for place in unit.places)


def keep_residuals(
    encoder: PushEncoder | None, state: ScriptState, num_workers: Callable[[], int], say: Callable[[str], None]
) -> None:
    """Adds residuals to the script's state. They belong to one worker, and to a number of workers."""
    if encoder is not None:
        state.add_part("residuals", _saved_part(encoder, num_workers, say))


def _saved_part(encoder: PushEncoder, num_workers: Callable[[], int], say: Callable[[str], None]) -> Part:
    has_told: list[bool] = []

    def take() -> dict[str, Any]:
        return {"workers": num_workers(), "residuals": encoder.take()}

    def put_back(saved: Any) -> None:
        try:
            count, found = int(saved["workers"]), {str(k): np.asarray(v) for k, v in saved["residuals"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"residuals of a checkpoint that cannot be read: {error!r}") from None
        if count == num_workers():
            encoder.put_back(found)
        elif not has_told:
            has_told.append(True)
            say(f"the checkpoint has residuals of {count} workers, the job has {num_workers()}: they are dropped")

    return Part(take, put_back, is_own=True)
