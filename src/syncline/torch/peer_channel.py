"""The device channel to servers in other processes of this host, on the same GPU (`--server-device cuda`).

The worker allocates an arena per segment and slot, which the servers map: gradients, and behind them room for as many
bytes of parameters. A server reads the gradients, and copies new parameters into the room before it answers. Nothing
of a server's is mapped here: its death leaves nothing half written in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from syncline.config import JobConfig
from syncline.core.codecs.named import NONE
from syncline.core.layout import Segment, Slice
from syncline.core.policy import policy_of
from syncline.core.wire.traffic import AttachDevice, AttachedDevice, DetachDevice
from syncline.net.device_channel import Handed
from syncline.net.device_memory import DeviceMemory, DeviceMemoryError, namespace
from syncline.net.rpc import Endpoint
from syncline.server.device_storage import uuid_of
from syncline.worker.exchange.servers import ServersExchange


def why_not(config: JobConfig, *, is_embedded: bool) -> str:
    """Why gradients of a worker on a GPU go through host memory, by the job's settings; empty if they need not."""
    policy = policy_of(config)
    reasons = {
        "worker and server are one process": is_embedded,
        f"--codec {config.codec}": config.codec not in NONE,
        f"--pull-codec {config.pull_codec}": config.pull_codec not in NONE,
        f"--replicas {config.replicas}": config.replicas > 1,
        "--transport tcp": config.transport == "tcp",
        "--aggregate": policy.aggregate is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class OwnArena:
    """The worker's memory for one segment and slot. Tests replace the GPU."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device, self._num_bytes = device, num_bytes
        self._memory = DeviceMemory.allocate(device.index or 0, 2 * num_bytes)
        whole = torch.as_tensor(self._memory, device=device).zero_()
        self.gradients, self.parameters = whole[:num_bytes], whole[num_bytes:]
        self.filled: Any = torch.cuda.Event(interprocess=True)
        self.answered: dict[str, Any] = {}  # an event for each server that has mapped it

    def offer(self, segment: int, slot: int) -> tuple[AttachDevice, Any]:
        """What a server maps it by, and the event that this server will record: one that several record tells of the
        last record only.
        """
        answered = torch.cuda.Event(interprocess=True)
        handles = (self._memory.handle, bytes(self.filled.ipc_handle()), bytes(answered.ipc_handle()))
        return AttachDevice(segment, slot, self._num_bytes, uuid_of(self._device), namespace(), *handles), answered

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._memory.close()


class PeerChannel:
    """Used by one thread at a time, as the exchange is; `parameters` also by those that receive answers."""

    def __init__(self, exchange: ServersExchange, device: torch.device, say: Callable[[str], None]) -> None:
        self.device, self._exchange, self._num_slots, self._say = device, exchange, exchange.num_slots, say
        self._opened: dict[int, Segment] = {}
        self._parts: dict[int, Slice] = {}
        self._arenas: dict[tuple[int, int], OwnArena] = {}  # by segment and slot
        self._slot = 0
        self._has_said = False
        self.segments: frozenset[int] = frozenset()

    def open_for(self, segment: Segment) -> bool:
        if segment.index in self._opened:
            return segment.index in self.segments
        try:
            for slot in range(self._num_slots):
                self._arenas[segment.index, slot] = OwnArena(self.device, segment.num_bytes)
        except (DeviceMemoryError, RuntimeError) as error:
            self._say_once(str(error).splitlines()[0])
            return False
        self._opened[segment.index] = segment
        self._parts.update((part.id, part) for part in segment.slices)
        self.segments |= {segment.index}
        self._exchange.tell_channel()
        return segment.index in self.segments

    # -- servers ------------------------------------------------------------------------------------------

    def follow(self, hosting: Callable[[int], Collection[str]], endpoints: Mapping[str, Endpoint]) -> None:
        for index in sorted(self.segments):
            for server in hosting(index):
                refusal = self._attach(self._opened[index], server, endpoints[server])
                if refusal:
                    self._fall_back(self._opened[index], endpoints)
                    self._say_once(f"{server}: {refusal}")
                    break

    def _attach(self, segment: Segment, server: str, endpoint: Endpoint) -> str:
        """Why a server does not map the arenas of a segment; empty if it does."""
        if not endpoint.shares_memory:
            return "it is on another host"
        for slot in range(self._num_slots):
            arena = self._arenas[segment.index, slot]
            if server in arena.answered:
                continue
            offer, answered = arena.offer(segment.index, slot)
            answer = endpoint.call(offer).wait(self._exchange.wait_seconds)
            if isinstance(answer, AttachedDevice) and answer.refusal:
                return answer.refusal
            arena.answered[server] = answered
        return ""

    def _fall_back(self, segment: Segment, endpoints: Mapping[str, Endpoint]) -> None:
        """Gradients of this segment go through host memory from now on, also those of open commits."""
        for slot in range(self._num_slots):
            array = self._exchange.routes.arenas.array(segment, slot)
            torch.from_numpy(array).copy_(self._arenas[segment.index, slot].gradients)
        self.segments -= {segment.index}
        for server in self._arenas[segment.index, 0].answered:
            endpoints[server].call(DetachDevice(segment.index)).wait(self._exchange.wait_seconds)

    def _say_once(self, reason: str) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(f"gradients and parameters go through host memory: {reason}")

    def forget(self, server: str) -> None:
        for arena in self._arenas.values():
            arena.answered.pop(server, None)

    # -- a step -------------------------------------------------------------------------------------------

    def memory(self, segment: int, slot: int) -> Handed | None:
        arena = self._arenas[segment, slot]
        return Handed(arena.gradients, arena.filled)

    def wait_until_read(self, segment: Segment, slot: int) -> None:
        for answered in self._arenas[segment.index, slot].answered.values():
            if answered is not None:
                answered.wait()  # the caller's stream does

    def give(self, segment: int, gradients: Handed) -> None:
        """Servers have the event already."""

    def arrived(self, slot: int) -> None:
        self._slot = slot

    def parameters(self, number: int) -> Handed | None:
        part = self._parts[number]
        arena = self._arenas[part.segment, self._slot]
        return Handed(_of(arena.parameters, part), arena.answered.get(self._exchange.routes.primaries[number]))

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        self.segments = frozenset()


def _of(flat: torch.Tensor, part: Slice) -> torch.Tensor:
    return flat[part.offset : part.offset + part.num_bytes]
