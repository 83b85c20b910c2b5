"""Arenas: where a worker's gradients lie until they are answered. Shared memory where a server is on this host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from syncline.config import JobConfig
from syncline.core.layout import Segment, Slice
from syncline.core.wire.traffic import Attach
from syncline.errors import ConfigError
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Endpoint
from syncline.net.transport import Memory, buffer_of
from syncline.worker.arrays import Bytes


class Arenas:
    """One arena per segment and slot, made when it is first needed, attached to all who are to read it in place."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        hosting: Callable[[int], Collection[str]],
        num_slots: int,
        config: JobConfig,
        say: Callable[[str], None],
    ) -> None:
        """`hosting`: the servers that are primaries of anything of a segment; they and the endpoints change."""
        self._endpoints, self._hosting = endpoints, hosting
        self._num_slots, self._config, self._say = num_slots, config, say
        self._memories: dict[tuple[int, int], Memory] = {}
        self._sizes: dict[int, int] = {}
        self._shared: set[tuple[str, int, int]] = set()  # server, segment, slot
        self._fell_back = False

    def array(self, segment: Segment, slot: int) -> Bytes:
        """All of the arena, laid out as the segment is."""
        key = (segment.index, slot)
        if key not in self._memories:
            self._memories[key] = self._create(segment)
            self._sizes[segment.index] = segment.num_bytes
            self._attach(*key)
        return self._memories[key].array

    def has(self, segment: int, slot: int) -> bool:
        return (segment, slot) in self._memories

    def view(self, part: Slice, slot: int) -> memoryview:
        return buffer_of(self.bytes_of(part, slot))

    def bytes_of(self, part: Slice, slot: int) -> Bytes:
        """This slice of the arena, where it lies."""
        return self._memories[part.segment, slot].array[part.offset : part.offset + part.num_bytes]

    def is_shared(self, server: str, segment: int, slot: int) -> bool:
        """Whether this server reads the arena in place."""
        return (server, segment, slot) in self._shared

    def _create(self, segment: Segment) -> Memory:
        sharing = [self._endpoints[n] for n in self._hosting(segment.index) if self._endpoints[n].shares_memory]
        if sharing and not self._fell_back:
            try:
                return sharing[0].create_memory(segment.num_bytes)
            except OSError as error:
                self._fall_back(segment, error)
        return HeapMemory(segment.num_bytes)

    def attach(self) -> None:
        """Whoever has become a primary reads the arenas in place from now on, where it can."""
        for segment, slot in self._memories:
            self._attach(segment, slot)

    def _attach(self, segment: int, slot: int) -> None:
        memory = self._memories[segment, slot]
        for server in self._hosting(segment):
            endpoint, key = self._endpoints[server], (server, segment, slot)
            if key not in self._shared and not self._fell_back and endpoint.shares_memory:
                if not endpoint.can_carry(memory):
                    continue  # it was made when all servers were elsewhere
                message = Attach(segment, slot, self._sizes[segment])
                endpoint.call(message, attachment=memory).wait(self._config.wait_seconds)
                self._shared.add(key)

    def forget(self, server: str) -> None:
        """The connection to this server is gone, and what was attached by it."""
        self._shared = {key for key in self._shared if key[0] != server}

    def _fall_back(self, segment: Segment, error: OSError) -> None:
        needed = segment.num_bytes * self._num_slots
        reason = f"too little memory for arenas of {needed} bytes ({self._num_slots} x {segment.num_bytes})"
        if self._config.transport == "shm":
            raise ConfigError(f"{reason}: {error.strerror or error}; use --transport auto or tcp") from None
        self._fell_back = True
        self._say(f"{reason}: {error.strerror or error}; falls back to TCP: gradients go over the socket")

    def close(self) -> None:
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
