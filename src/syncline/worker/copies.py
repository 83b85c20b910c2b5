"""A worker's copies of slices: what is left of them when their only server is gone.

What the servers said of a landing is kept with its sink; nothing here is done per step and slice. A copy counts only
while the sink's memory is what was said of it: that is looked at before and after its bytes are taken.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Mapping, Sequence

from syncline.core.layout import Layout, Slice
from syncline.core.members import Member
from syncline.core.slice_state import Copy
from syncline.core.wire.traffic import Committed, Restore
from syncline.errors import SynclineError
from syncline.net.rpc import Call, Endpoint
from syncline.net.transport import buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.sinks import Landed, Sink, gathered, holds_all

_MOST_OPEN = 4
Told = Committed | Mapping[int, int]  # versions of all slices of a server, or of these


class KeptArrays:
    """Arrays that belong to the caller: copies of slices for as long as they live."""

    def __init__(self, layout: Layout, arrays: Mapping[str, Callable[[], Bytes | None]]) -> None:
        self._layout, self._arrays = layout, arrays

    def holds(self, part: Slice) -> bool:
        return holds_all(self._layout, part, lambda name: self._bytes_of(name) is not None)

    def copy_of(self, part: Slice) -> Bytes | None:
        return gathered(self._layout, part, self._bytes_of)

    def _bytes_of(self, name: str) -> Bytes | None:
        array = self._arrays.get(name)
        return array() if array is not None else None


class Copies:
    """All copies of this worker. `told` and `landed_in` are for the script's thread; the questions for any."""

    def __init__(self, name: str, layout: Layout, wait_seconds: float, num_kept: int) -> None:
        """`num_kept`: so many sinks that landed last are kept alive; with two replicas nobody will ask for them."""
        self._name, self._layout, self._wait_seconds = name, layout, wait_seconds
        self._sinks: list[weakref.ref[Sink]] = []
        self._last: collections.deque[Sink] = collections.deque(maxlen=num_kept)
        self._arrays: dict[int, tuple[Landed, KeptArrays]] = {}  # by slice
        self.told: dict[str, tuple[Sequence[Slice], Told]] = {}  # by server: the last that it said
        self._known: dict[int, int] = {}  # the highest version of a slice, before that
        self._most_updates = 0  # of any slice

    def landed_in(self, sink: Sink) -> None:
        """Slices come into this sink from now on."""
        refs = [ref for ref in self._sinks if ref() is not None and ref() is not sink]
        self._sinks = [*refs, weakref.ref(sink)]
        if not any(known is sink for known in self._last):
            self._last.append(sink)

    def has_landed(self, sink: Sink | None) -> None:
        """All of a commit has come into this sink: where it takes everything, nothing older is kept beside it."""
        if len(self._last) > 1 and self._last[-1] is sink and all(map(sink.wants, self._layout.slices())):
            self._last = collections.deque([sink], self._last.maxlen)

    def _alive(self) -> list[Sink]:
        return [sink for ref in self._sinks if (sink := ref()) is not None]

    def keep(self, sink: Sink, parts: Sequence[Slice], arrays: KeptArrays) -> None:
        """What is in the sink lies in arrays of the caller, which outlive it."""
        for part in parts:
            found = _in_sink(sink, part)
            if found is not None:
                self._arrays[part.id] = (found, arrays)

    def overwrites(self, sink: Sink, parts: Sequence[Slice]) -> None:
        """This sink writes into arrays of the caller, which may be those that something else was said of."""
        for part in parts:
            self._arrays.pop(part.id, None)
            for other in self._alive():
                if other is not sink:
                    other.kept[part.id] = None

    def pulled(self, versions: Sequence[int]) -> None:
        """Slices were read, outside of a commit."""
        self._most_updates = max(self._most_updates, *versions, 0)

    @property
    def most_updates(self) -> int:
        """That any slice has had, by all that servers have answered so far."""
        for hosted, said in list(self.told.values()):
            self._most_updates = max(self._most_updates, *_versions(hosted, said).values(), 0)
        return self._most_updates

    def begin_anew(self) -> None:
        """Servers change: what was said by server is kept by slice."""
        self._most_updates = self.most_updates
        for hosted, said in self.told.values():
            for number, version in _versions(hosted, said).items():
                self._known[number] = max(version, self._known.get(number, 0))
        self.told.clear()
        for sink in self._alive():
            for wanted in sink.wanted.values():
                for number, found in wanted.landed().items():
                    sink.kept.setdefault(number, found)
            sink.wanted.clear()

    # -- what the coordinator asks ------------------------------------------------------------------------

    def copies_of(self, slices: Sequence[int]) -> list[Copy]:
        """The newest that is here of each of these slices."""
        found = []
        parts = self._parts()
        for number in slices:
            part = parts.get(number)
            newest = self._newest(part) if part is not None else None
            if newest is not None:
                found.append(self._described(number, newest[0]))
        return found

    def _parts(self) -> dict[int, Slice]:
        return {part.id: part for segment in list(self._layout.segments) for part in segment.slices}

    def _newest(self, part: Slice) -> tuple[Landed, Sink | KeptArrays] | None:
        found: list[tuple[Landed, Sink | KeptArrays]] = []
        kept = self._arrays.get(part.id)
        if kept is not None:
            found.append(kept)
        for sink in self._alive():
            landed = _in_sink(sink, part)
            if landed is not None:
                found.append((landed, sink))
        found.sort(key=lambda pair: pair[0].version, reverse=True)
        return next((pair for pair in found if pair[1].holds(part)), None)

    def _described(self, number: int, landed: Landed) -> Copy:
        clocks = dict(landed.clocks)
        # What was acknowledged to this worker after that is revoked with the server: it is never made again.
        own = max([landed.own, *(said.clock for parts, said in self._said() if number in parts)])
        if own:
            clocks[self._name] = max(own, clocks.get(self._name, 0))
        known = [landed.version, self._known.get(number, 0)]
        known += [_versions(hosted, said).get(number, 0) for hosted, said in list(self.told.values())]
        return Copy(number, landed.version, clocks, max(known))

    def _said(self) -> list[tuple[set[int], Committed]]:
        """The last acknowledgement of every server, with the slices that it is for."""
        told = list(self.told.values())
        return [({part.id for part in hosted}, said) for hosted, said in told if isinstance(said, Committed)]

    def bytes_of(self, copy: Copy) -> Bytes:
        """The bytes of a copy that was told of; an error when it is not here any more."""
        part = self._parts().get(copy.slice)
        newest = self._newest(part) if part is not None else None
        if part is not None and newest is not None and newest[0].version == copy.version:
            landed, source = newest
            data = source.copy_of(part)
            again = self._newest(part)
            if data is not None and again is not None and again[0] == landed:
                return data
        raise SynclineError(f"{self._name} has no copy of slice {copy.slice} at version {copy.version} any more")

    def give(self, copies: Sequence[Copy], target: Member, dial: Callable[[Member], Endpoint]) -> None:
        """Brings copies to the server that is to have these slices."""
        endpoint = dial(target)
        calls: collections.deque[Call] = collections.deque()
        try:
            for copy in copies:
                data = self.bytes_of(copy)
                calls.append(endpoint.call(Restore(copy), buffers=[buffer_of(data)], payload_bytes=data.nbytes))
                if len(calls) >= _MOST_OPEN:
                    calls.popleft().wait(self._wait_seconds)
            for call in calls:
                call.wait(self._wait_seconds)
        finally:
            endpoint.close()


def _in_sink(sink: Sink, part: Slice) -> Landed | None:
    if part.id in sink.kept:
        return sink.kept[part.id]
    for wanted in list(sink.wanted.values()):
        if part.id in wanted.by_id:
            return wanted.landed().get(part.id)
    return None


def _versions(hosted: Sequence[Slice], said: Told) -> Mapping[int, int]:
    if not isinstance(said, Committed):
        return said
    if len(said.versions) != len(hosted):
        return {}
    return {part.id: version for part, version in zip(hosted, said.versions, strict=True)}
