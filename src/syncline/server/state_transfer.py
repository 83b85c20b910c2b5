"""Reads and writes rule state, for `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from syncline.core.layout import Slice
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import AskState, GivenState, LoadState, StateEntry
from syncline.errors import ProtocolError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, buffer_of
from syncline.reduce.kernels import Numbers
from syncline.server.numbers import bytes_of, numbers_in
from syncline.server.slices import HostedSlice
from syncline.server.tasks import FenceTask

_MOST_SAID = 1 << 16


def check_entry(entry: StateEntry, part: Slice) -> None:
    """A state tensor has at most the size of its slice in double precision; what describes a group may be larger."""
    if entry.slice != part.id or entry.num_bytes > 8 * part.num_bytes + _MOST_SAID:
        raise ProtocolError(f"state {entry.key!r} of {entry.num_bytes} bytes for slice {entry.slice}")


class StateTransfer:
    """Reads and writes the state of hosted slices."""

    def __init__(self, slices: dict[int, HostedSlice], *, find: Callable[[int], Slice]) -> None:
        self._slices, self._find = slices, find

    def _slot(self, number: int) -> HostedSlice:
        slot = self._slices.get(number)
        if slot is None:
            raise ProtocolError(f"slice {number} is not hosted here")
        return slot

    def give(self, request: Request, message: AskState) -> None:
        entries: list[StateEntry] = []
        buffers: list[Buffer] = []
        for number in message.slices:
            slot = self._slot(number)
            with slot.lock:
                for entry, tensor in slot.rules.state():
                    if message.key not in ("", entry.key):
                        continue
                    entries.append(entry)
                    buffers.append(buffer_of(bytes_of(tensor).copy()))
        request.reply(GivenState(entries), buffers, sum(map(len, buffers)))

    def buffers_for(self, message: LoadState) -> Sequence[Buffer]:
        for entry in message.entries:
            check_entry(entry, self._find(entry.slice))
        return [buffer_of(np.empty(entry.num_bytes, np.uint8)) for entry in message.entries]

    def load(self, request: Request, message: LoadState) -> None:
        grouped: dict[int, list[tuple[StateEntry, Numbers]]] = {number: [] for number in message.slices}
        for entry, buffer in zip(message.entries, request.payload, strict=True):
            if entry.slice not in grouped:
                raise ProtocolError(f"state for slice {entry.slice}, which is not named")
            tensor = numbers_in(np.frombuffer(buffer, np.uint8), entry.dtype).reshape(entry.shape)
            grouped[entry.slice].append((entry, tensor))
        slots = [self._slot(number) for number in grouped]
        with_backup = []
        for slot, entries in zip(slots, grouped.values(), strict=True):
            with slot.lock:
                slot.rules.load_state(entries)
                if slot.replicas:
                    with_backup.append(slot)
        self._when_backed(with_backup, lambda: request.reply(Done()))

    def _when_backed(self, slots: Sequence[HostedSlice], then: Callable[[], None]) -> None:
        """Sends the changed slices to their backups, then calls `then`."""
        if not slots:
            then()
            return
        work = FenceTask((), slots, lambda work: then())
        for slot in slots:
            with slot.lock:
                for replica in slot.replicas:
                    replica.needs_seed = True
                slot.put(work)
        for slot in slots:
            slot.drain()
