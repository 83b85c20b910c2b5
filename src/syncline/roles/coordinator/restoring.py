"""Slices that no server has any more come back from the freshest worker's copy; what that revokes is said."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

from syncline.core.control import AskCopies, GiveCopies, GivenCopies, Host
from syncline.core.layout import Segment
from syncline.core.message import Message
from syncline.core.policy import parse_policy
from syncline.core.slices import Copy, Identity, freshest, num_revoked
from syncline.core.words import counted
from syncline.errors import ConnectionLost, SynclineError, WaitTimeout

if TYPE_CHECKING:
    from syncline.roles.coordinator.coordinator import Coordinator

#: For a worker to say which copies it has.
_ASK_SECONDS = 5.0


class Asking(Protocol):
    """Who asks servers and waits for their answers."""

    def ask_servers(self, messages: Mapping[str, Message]) -> dict[str, Message]:
        """The answers of all."""


def restore(coordinator: Coordinator, asking: Asking) -> None:
    """Hosts the lost slices where the seats say, and has workers bring what they have of them."""
    with coordinator.lock:
        lost = list(coordinator.membership.state.lost)
        if not lost:
            return
        seats = {number: coordinator.membership.state.seats[number].primary for number in lost}
        segments = [s for s in coordinator.registry.layout.segments if any(part.id in seats for part in s.slices)]
        ready = set(coordinator.registry.ready)
    for segment in segments:
        here = [part.id for part in segment.slices if part.id in seats]
        by_server: dict[str, Message] = {}
        for server in {seats[number] for number in here}:
            by_server[server] = Host(segment, [number for number in here if seats[number] == server])
        asking.ask_servers(by_server)
    with_values = [part.id for s in segments if s.index in ready for part in s.slices if part.id in seats]
    chosen, revoked = _bring(coordinator, with_values, seats, segments) if with_values else ({}, 0)
    if with_values:
        # Said before it is kept: a coordinator that dies in between says it again, never not at all.
        names = ", ".join(sorted(set(chosen.values())))
        least = "at least " if _a_worker_is_gone(coordinator) else ""
        is_spare = bool(parse_policy(coordinator.config.policy).spare)
        coordinator.event(
            f"{counted(len(with_values), 'slice')} came back from the copy of {names}, with fresh rule state; "
            f"{least}{counted(revoked, 'acknowledged update')} {'was' if revoked == 1 else 'were'} revoked"
            + ("; steps that were under way may be on some slices only" if is_spare else "")
        )
    with coordinator.lock:
        state = coordinator.membership.state
        state.lost = [number for number in state.lost if number not in seats]
        state.num_revoked += revoked
        if 0 in with_values:
            coordinator.handing.uses_are_lost()
        coordinator.keep()


def _a_worker_is_gone(coordinator: Coordinator) -> bool:
    """Then what was acknowledged to it is not known any more."""
    gone = [*coordinator.membership.state.left, *coordinator.evicted]
    return any(name.startswith("worker-") for name in gone)


def _bring(
    coordinator: Coordinator, lost: Sequence[int], seats: Mapping[int, str], segments: Sequence[Segment]
) -> tuple[dict[int, str], int]:
    """Who brought which slice, and how many acknowledged updates are gone with the servers."""
    copies = _copies(coordinator, lost)
    chosen: dict[int, tuple[str, Copy]] = {}
    for number in lost:
        found = freshest(copies, number)
        if found is None:
            _give_up(coordinator, number, segments)
        chosen[number] = found
    _have_them_brought(coordinator, chosen, seats)
    return {number: name for number, (name, _) in chosen.items()}, num_revoked(copy for _, copy in chosen.values())


def _copies(coordinator: Coordinator, lost: Sequence[int]) -> dict[Identity, list[Copy]]:
    with coordinator.lock:
        members = coordinator.membership.state.members
        lives = {name: (name, members[name].incarnation) for name in coordinator.membership.workers()}
        workers = {name: coordinator.endpoints.get(name) for name in lives}
    found: dict[Identity, list[Copy]] = {}
    calls = []
    for name, endpoint in workers.items():
        if endpoint is None:  # it comes back, or is evicted: either is known soon
            raise ConnectionLost(f"{name} is not there, and may have the freshest copy")
        calls.append((name, endpoint.call(AskCopies(list(lost)))))
    until = time.monotonic() + _ASK_SECONDS
    for name, call in calls:
        try:
            answer = call.wait(max(0.0, until - time.monotonic()))
        except (ConnectionLost, WaitTimeout):
            raise
        except SynclineError:
            continue  # it says that it has none
        if isinstance(answer, GivenCopies):
            found[lives[name]] = answer.copies
    return found


def _have_them_brought(
    coordinator: Coordinator, chosen: Mapping[int, tuple[str, Copy]], seats: Mapping[int, str]
) -> None:
    pairs: dict[tuple[str, str], list[Copy]] = {}
    for number, (name, copy) in chosen.items():
        pairs.setdefault((name, seats[number]), []).append(copy)
    calls = []
    for (name, server), copies in pairs.items():
        with coordinator.lock:
            endpoint = coordinator.endpoints.get(name)
            target = coordinator.membership.state.members.get(server)
        if endpoint is None or target is None:
            raise ConnectionLost(f"{name} or {server} is not there")
        calls.append(endpoint.call(GiveCopies(copies, target)))
    for call in calls:
        call.wait(coordinator.config.wait_seconds)


def _give_up(coordinator: Coordinator, number: int, segments: Iterable[Segment]) -> NoReturn:
    names = [
        segment.parameters[piece.parameter].name
        for segment in segments
        for part in segment.slices
        if part.id == number
        for piece in segment.pieces(part)
    ]
    shown = ", ".join(repr(name) for name in names[:3])
    reason = f"no server and no worker has a copy of {shown}; with --replicas 2 a server's death costs nothing"
    with coordinator.lock:
        coordinator.membership.fail("server", reason)
    coordinator.ending.conclude()
    raise ConnectionLost(reason)
