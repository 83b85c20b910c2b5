"""The rules' state, fetched from the servers and given back to them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np

from syncline.core.layout import Slice
from syncline.core.wire.message import Message
from syncline.core.wire.traffic import AskState, GivenState, LoadState, StateEntry
from syncline.errors import ProtocolError, SynclineError
from syncline.net.rpc import Endpoint, wait_all
from syncline.net.transport import buffer_of
from syncline.worker.arrays import Bytes
from syncline.worker.placement import Placement

Entries = Sequence[tuple[StateEntry, Bytes]]


def read_state(
    placement: Placement, slices: Sequence[Slice], seconds: float, key: str = ""
) -> list[tuple[StateEntry, Bytes]]:
    """What the rules remember about these slices, one slice after the other; `key`: only this of it."""
    found: list[tuple[StateEntry, Bytes]] = []
    for part in slices:
        found += _read_one(placement.endpoints[placement.primaries[part.id]], part.id, seconds, key)
    return found


def _read_one(endpoint: Endpoint, number: int, seconds: float, key: str) -> list[tuple[StateEntry, Bytes]]:
    landed: list[Bytes] = []

    def landing(answer: Message) -> list[memoryview]:
        if isinstance(answer, GivenState):
            landed.extend(np.empty(entry.num_bytes, np.uint8) for entry in answer.entries)
        return [buffer_of(array) for array in landed]

    answer = endpoint.call(AskState([number], key), into=landing).wait(seconds)
    if not isinstance(answer, GivenState):
        raise ProtocolError(f"state was answered with {type(answer).__name__}")
    return list(zip(answer.entries, landed, strict=True)) if landed else []


def write_state(placement: Placement, slices: Sequence[Slice], entries: Entries, seconds: float) -> None:
    """Gives the rules their state on these slices: on all of them before a cut, or behind it."""
    endpoints = list(placement.endpoints.values())
    wait_all([endpoint.call(LoadState([], [], about=1)) for endpoint in endpoints], seconds)
    try:
        _write_state(placement, slices, entries, seconds)
    finally:
        with contextlib.suppress(SynclineError):  # who is not there, or has other slices, has forgotten it
            wait_all([endpoint.call(LoadState([], [], about=2)) for endpoint in endpoints], seconds)


def _write_state(placement: Placement, slices: Sequence[Slice], entries: Entries, seconds: float) -> None:
    calls = []
    for server, endpoint in placement.endpoints.items():
        numbers = [part.id for part in slices if placement.primaries[part.id] == server]
        mine = [(entry, data) for entry, data in entries if entry.slice in set(numbers)]
        if numbers:
            message = LoadState(numbers, [entry for entry, _ in mine])
            buffers = [buffer_of(data) for _, data in mine]
            calls.append(endpoint.call(message, buffers=buffers, payload_bytes=sum(map(len, buffers))))
    wait_all(calls, seconds)
