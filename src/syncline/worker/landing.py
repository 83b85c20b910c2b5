"""How one commit's new parameters come in from one server: slice by slice as they are applied, or all at the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from syncline.core.layout import Slice
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import Committed
from syncline.errors import ProtocolError
from syncline.net.device_channel import DeviceChannel
from syncline.net.transport import Buffer, buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.copying import copy
from syncline.worker.incoming import Incoming, sizes_of
from syncline.worker.reading import ServerReader
from syncline.worker.sinks import Sink, Wanted, landed, scattered

_NOTHING: Bytes = np.empty(0, np.uint8)


class Landing:
    """One commit's parameters from one server.

    Settled: nobody may write the server's memory before this worker's next commit. With a slot, bytes from the
    socket wait in buffers of this slot until they are unloaded: the model computes on meanwhile.
    """

    def __init__(
        self,
        reader: ServerReader,
        wanted: Wanted,
        sink: Sink,
        *,
        settled: bool,
        slot: int | None,
        incoming: Incoming | None = None,
        hatch: DeviceChannel | None = None,
    ) -> None:
        """`incoming`: where the server encodes what it sends. `device channel`: what goes through it is not in host
        memory."""
        self._hatch = hatch
        self._reader, self._wanted, self._sink, self._incoming = reader, wanted, sink, incoming
        self._settled, self._slot = settled, slot
        self._landed: set[int] = set()
        self.versions: dict[int, int] = {}  # of the slices that came in parts
        self._is_given_up = False

    @property
    def pull(self) -> list[int]:
        return self._wanted.pull

    @property
    def in_parts(self) -> bool:
        """Whether the sink takes slices one by one while the server still applies others."""
        return self._settled and self._sink.in_parts and bool(self._wanted.mapped)

    def wants(self, numbers: Collection[int]) -> set[int]:
        """Those of these slices that come by this way."""
        return {number for number in numbers if number in self._wanted.by_id}

    def buffers(self, answer: Message) -> Sequence[Buffer]:
        """Where the bytes behind an answer go."""
        if not isinstance(answer, Committed):
            raise ProtocolError(f"a commit was answered with {type(answer).__name__} and bytes")
        parts = self._parts(answer)
        found: list[Buffer] = []
        for part, sizes in zip(parts, sizes_of(answer, self._incoming), strict=True):
            if sizes:
                assert self._incoming is not None
                found += self._incoming.room(part, sizes)
            elif self._is_given_up:
                found.append(buffer_of(np.empty(part.num_bytes, np.uint8)))
            else:
                found += map(buffer_of, self._targets(part))
        return found

    def _targets(self, part: Slice) -> list[Bytes]:
        """Buffers that take a slice from the socket; it is written from now on."""
        if self._slot is not None:
            return [self._reader.buffer(self._slot, part)]
        self._sink.kept[part.id] = None
        return self._sink.views(part)

    def give_up(self) -> None:
        """The commit is made again: whatever still comes by this way goes nowhere.

        What is coming in already is through before any server is told again to commit: first they all acknowledge
        what is staged, each by the connection that its old answer comes by.
        """
        self._is_given_up = True

    def _parts(self, answer: Committed) -> list[Slice]:
        try:
            return [self._wanted.by_id[number] for number in answer.slices]
        except KeyError as error:
            raise ProtocolError(f"slice {error} came, which was not asked for") from None

    def arrived(self, answer: Message) -> None:
        """Some slices are applied; those that come over the socket are here."""
        assert isinstance(answer, Committed)
        if self._is_given_up:
            return
        by_id = self._wanted.by_id  # without bytes, the server names slices that nobody here wants, too
        parts = [by_id[number] for number in answer.slices if number in by_id and number not in self._landed]
        remote = [part for part in parts if part.id in self._wanted.remote]
        if self._incoming is not None:
            self._incoming.heard(answer, {part.id: part for part in remote})
            for part in remote:
                if self._incoming.has(part):
                    self._incoming.unpack(part, self._targets(part))
        if remote and self._slot is None:
            self._sink.filled(remote)
        mapped = [(part, self._source(part)) for part in parts if part.id not in self._wanted.remote]
        if mapped and self._settled:
            self._sink.kept.update((part.id, None) for part, _ in mapped)
            self._sink.take(mapped)
        if parts:
            self._keep(answer, parts if self._settled else remote)
        with self._reader.change:
            self._landed.update(part.id for part in remote)
            if self._settled:
                self._landed.update(part.id for part, _ in mapped)
            self._reader.change.notify_all()

    def _keep(self, answer: Committed, parts: Sequence[Slice]) -> None:
        """These slices are what this part of the answer says; without clocks that is known with its end only."""
        ids = {part.id for part in parts}
        found = {n: v for n, v in zip(answer.slices, answer.versions, strict=False) if n in ids}
        self.versions.update(found)
        if self._slot is None and answer.clocks:
            self._sink.kept.update((n, landed(v, answer.clocks, answer.clock)) for n, v in found.items())

    def has(self, numbers: Collection[int]) -> bool:
        return self._landed.issuperset(numbers)

    def wait_for(self, numbers: Collection[int], seconds: float) -> None:
        """Until these slices have landed, or this long."""
        with self._reader.change:
            self._reader.change.wait_for(lambda: self.has(numbers), seconds)

    def finish(self, answer: Committed) -> None:
        """The commit is whole: whatever has not landed yet lands now."""
        wanted, kept = self._wanted, self._sink.kept
        wanted.answer = None  # until all of it is there
        if answer.slices:
            self.arrived(answer)
        if self._slot is not None and wanted.pull:
            self._unload()
        self._land_mapped(answer)
        if self.versions:
            kept.update((n, landed(v, answer.clocks, answer.clock)) for n, v in self.versions.items())
        elif self._settled:
            wanted.answer = answer
            if kept:
                for number in wanted.by_id:
                    kept.pop(number, None)

    def _land_mapped(self, answer: Committed) -> None:
        left = [(k, part) for k, part in self._wanted.mapped if part.id not in self._landed]
        if self._hatch is not None and self._hatch.segments:
            asked = [
                part for _, part in left if part.segment in self._hatch.segments and not self._sink.fetches(part)
            ]
            if asked:
                self._reader.pull(asked, self._sink, None)
                left = [(k, part) for k, part in left if part not in asked]
        if not left:
            return
        if self._settled:
            if self._sink.kept:
                self._sink.kept.update((part.id, None) for _, part in left)
            self._sink.take([(part, self._source(part)) for _, part in left])
        elif self.pull or len(answer.versions) < len(self._wanted.hosted):
            # Some segments came by socket, some by shared memory: ask for the versions of these.
            self._reader.pull([part for _, part in left], self._sink, None)
        else:
            versions = [answer.versions[k] for k, _ in left]
            self._reader.copy_verified([part for _, part in left], versions, answer.clocks, self._sink)

    def _source(self, part: Slice) -> Bytes:
        return _NOTHING if self._sink.fetches(part) else self._reader.source(part)

    def _unload(self) -> None:
        assert self._slot is not None
        parts = list(self._wanted.remote.values())
        self._sink.kept.update((part.id, None) for part in parts)
        buffers = [(part, self._reader.buffer(self._slot, part)) for part in parts]
        copy([pair for part, buffer in buffers for pair in scattered(buffer, self._sink.views(part))])
        self._sink.filled(parts)
