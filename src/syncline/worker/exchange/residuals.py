"""A worker's pushes, encoded: what an encoding leaves out of a push, the residual, is added to the next one.

A residual counts from the commit on, and only if the commit does: after a push that is void, skipped or late it is as
it was before. What was committed is kept as it was encoded: made again, the same bytes go out.
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
    """A slice of the next push, encoded; what that leaves out, and what of the slice is in it."""

    part: Slice
    encoded: Encoded
    residual: Floats | None
    has: set[PiecePlace]


def encoder_of(
    codecs: Codecs, layout: Layout, *, checks_finite: bool, forget_staged: Callable[[], None]
) -> PushEncoder | None:
    """For a job that encodes what is pushed."""
    coder = coder_of(codecs.push, codecs)
    if coder is None:
        return None
    return PushEncoder(coder, layout, checks_finite=checks_finite, forget_staged=forget_staged)


class PushEncoder:
    """Of one worker; used by the thread that uses the exchange."""

    def __init__(
        self, coder: SliceCoder, layout: Layout, *, checks_finite: bool, forget_staged: Callable[[], None]
    ) -> None:
        """`forget_staged`: what was staged early is staged again; it calls `forget`."""
        self.coder, self._layout, self._checks_finite = coder, layout, checks_finite
        self._forget_staged = forget_staged
        self._pending: dict[int, _Pending] = {}  # by slice, as all that follows
        self._residuals: dict[int, Floats] = {}
        self._parts: dict[int, Slice] = {}  # that have residuals
        self._before: dict[int, Floats] = {}  # as they were before the last commit; or memory for the next ones
        self._saved: Mapping[str, Floats] = {}  # by parameter: of a checkpoint, until slices have theirs

    # -- the next push ------------------------------------------------------------------------------------

    def encode(self, part: Slice, data: Bytes, pushed: Ranges | None) -> Encoded | None:
        """What travels of this slice of the arena; None: it goes as it lies. `pushed`: None: all of it is filled."""
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
        """What the unit `has` not counts as zeros."""
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
        """The residual is what there was in all, less what the other side will read."""
        with np.errstate(all="ignore"):
            total -= self.coder.decoded(encoding, unit)
        if not self._checks_finite and not np.isfinite(total).all():
            np.nan_to_num(total, copy=False, nan=0.0, posinf=0.0, neginf=0.0)  # else every push after it is spoilt
        for place, left in unit.spread(total):
            residual[place.items] = left

    def _room(self, part: Slice) -> Floats:
        """Memory for what this push leaves out; what those before it have left out is there after this."""
        if part.id not in self._residuals and self._saved:
            self._residuals[part.id], self._parts[part.id] = self._from_saved(part), part
        pending = self._pending.pop(part.id, None)
        if pending is not None and pending.residual is not None:
            return pending.residual
        known = self._before.pop(part.id, None)
        return known if known is not None else np.empty(part.num_bytes // 4, np.float32)

    def forget(self, number: int | None = None) -> None:
        """What is encoded of this slice (of all) will not be committed."""
        for key in [number] if number is not None else list(self._pending):
            pending = self._pending.pop(key, None)
            if pending is not None and pending.residual is not None:
                self._before.setdefault(key, pending.residual)

    def commit(self, pushed: Ranges) -> dict[int, Encoded]:
        """The push is made, with these parameters in it: what it leaves out is the residual from now on. Returns all
        that was encoded for it."""
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
        """`others`: what the push does not have."""
        number = part.id
        self._parts[number] = part
        before = self._residuals.get(number)
        if before is None:
            before = np.zeros(residual.size, np.float32)
        for place in others:
            residual[place.items] = before[place.items]
        self._residuals[number], self._before[number] = residual, before

    def take_back(self, encoded: Mapping[int, Encoded]) -> None:
        """That push, the last one, counted for nothing: residuals are as they were before it."""
        for number in encoded:
            if number in self._before and number in self._residuals:
                before = self._before[number]
                self._residuals[number], self._before[number] = before, self._residuals[number]

    # -- checkpoints --------------------------------------------------------------------------------------

    def take(self) -> dict[str, Floats]:
        """Residuals by parameter, as copies; those without any are left out."""
        found: dict[str, Floats] = {}
        for number, residual in self._residuals.items():
            for parameter, place in self._encoded_places(self._parts[number]):
                values = residual[place.items]
                if values.any():
                    whole = found.setdefault(parameter.name, np.zeros(parameter.num_items, np.float32))
                    whole[place.start : place.start + values.size] = values
        return found

    def put_back(self, saved: Mapping[str, Floats]) -> None:
        """Before the first push: these are the residuals. What was staged of it was encoded without them."""
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
    """Residuals are a part of a script's state. Each is its worker's own, and of the work of so many workers."""
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
