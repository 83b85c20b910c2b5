"""Arenas: where a worker's gradients lie until they are answered. Shared memory where a server is on this host."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from syncline.client.arrays import Bytes
from syncline.config import JobConfig
from syncline.core.layout import Segment, Slice
from syncline.core.messages import Attach
from syncline.errors import ConfigError
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Endpoint
from syncline.net.transport import Memory, buffer_of


class Arenas:
    """One arena per segment and slot, made when it is first needed."""

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        num_slots: int,
        config: JobConfig,
        say: Callable[[str], None],
    ) -> None:
        self._endpoints, self._num_slots, self._config, self._say = endpoints, num_slots, config, say
        self._memories: dict[tuple[int, int], Memory] = {}
        self._shared: set[tuple[str, int, int]] = set()  # server, segment, slot
        self._fell_back = False

    def array(self, segment: Segment, slot: int) -> Bytes:
        """All of the arena, laid out as the segment is."""
        key = (segment.index, slot)
        if key not in self._memories:
            self._memories[key] = self._create(segment, slot)
        return self._memories[key].array

    def view(self, part: Slice, slot: int) -> memoryview:
        array = self._memories[part.segment, slot].array
        return buffer_of(array[part.offset : part.offset + part.num_bytes])

    def is_shared(self, server: str, segment: int, slot: int) -> bool:
        """Whether this server reads the arena in place."""
        return (server, segment, slot) in self._shared

    def _create(self, segment: Segment, slot: int) -> Memory:
        hosting = {part.server for part in segment.slices}
        sharing = [n for n, e in self._endpoints.items() if e.shares_memory and n in hosting]
        if sharing and not self._fell_back:
            try:
                memory = self._endpoints[sharing[0]].create_memory(segment.num_bytes)
            except OSError as error:
                self._fall_back(segment, error)
            else:
                for name in sharing:
                    call = self._endpoints[name].call(
                        Attach(segment.index, slot, segment.num_bytes), attachment=memory
                    )
                    call.wait(self._config.wait_seconds)
                    self._shared.add((name, segment.index, slot))
                return memory
        return HeapMemory(segment.num_bytes)

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
