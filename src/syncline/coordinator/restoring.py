"""Slices that no server has any more come back from the freshest worker's copy, or from a checkpoint of this job.

From where less is lost; what that revokes is said.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

from syncline.core.checkpoint.manifest import SavedSlice
from syncline.core.checkpoint.restoring import is_no_older
from syncline.core.checkpoint.schedule import Checkpoint
from syncline.core.codecs.named import NONE
from syncline.core.layout import Segment
from syncline.core.policy import parse_policy
from syncline.core.slice_state import Copy, Identity, freshest, num_revoked
from syncline.core.units import counted
from syncline.core.wire.checkpoints import Resume
from syncline.core.wire.control import AskCopies, GiveCopies, GivenCopies, Host
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, StoreError, SynclineError, WaitTimeout
from syncline.store.checkpoints import read_manifest
from syncline.store.folders import open_folder

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator

#: For a worker to say which copies it has.
_ASK_SECONDS = 5.0


class Asking(Protocol):
    """Who asks servers and waits for their answers."""

    def ask_servers(self, messages: Mapping[str, Message]) -> dict[str, Message]:
        """The answers of all."""


#: Whose copy of a slice, and what is said of it.
Brought = tuple[str, Copy]


@dataclasses.dataclass
class Back:
    """What has come back, and from where."""

    checkpoint: str = ""
    from_workers: dict[int, Brought] = dataclasses.field(default_factory=dict)
    from_disk: dict[int, SavedSlice] = dataclasses.field(default_factory=dict)
    num_revoked: int = 0
    is_known: bool = True  # whether anybody knows what was acknowledged
    pull_codec: str = ""  # by which workers over sockets have got what they have

    def told(self) -> str:
        words = []
        if self.from_workers:
            names = ", ".join(sorted({name for name, _ in self.from_workers.values()}))
            count = counted(len(self.from_workers), "slice")
            exactly = f" (over sockets rounded, by --pull-codec {self.pull_codec})" if self.pull_codec else ""
            words.append(f"{count} came back from the copy of {names}{exactly}, with fresh rule state")
        if self.from_disk:
            count = counted(len(self.from_disk), "slice")
            words.append(f"{count} came back from {self.checkpoint}, which is no older, with the rule's state")
        return "; ".join(words)


def restore(coordinator: Coordinator, asking: Asking) -> None:
    """Hosts the lost slices where the replica sets say, and has workers bring what they have of them."""
    with coordinator.lock:
        lost = list(coordinator.membership.state.lost)
        if not lost:
            return
        replica_sets = {number: coordinator.membership.state.replica_sets[number].primary for number in lost}
        segments = [
            s for s in coordinator.registry.layout.segments if any(part.id in replica_sets for part in s.slices)
        ]
        ready = set(coordinator.registry.ready)
    for segment in segments:
        here = [part.id for part in segment.slices if part.id in replica_sets]
        by_server: dict[str, Message] = {}
        for server in {replica_sets[number] for number in here}:
            by_server[server] = Host(segment, [number for number in here if replica_sets[number] == server])
        asking.ask_servers(by_server)
    with_values = [part.id for s in segments if s.index in ready for part in s.slices if part.id in replica_sets]
    back = _bring(coordinator, asking, with_values, replica_sets, segments) if with_values else Back()
    if with_values:
        # Said before it is kept: a coordinator that dies in between says it again, never not at all.
        least = "at least " if _a_worker_is_gone(coordinator) or not back.is_known else ""
        is_spare = bool(parse_policy(coordinator.config.policy).spare)
        coordinator.event(
            f"{back.told()}; {least}{counted(back.num_revoked, 'acknowledged update')} "
            f"{'was' if back.num_revoked == 1 else 'were'} revoked"
            + ("; steps that were under way may be on some slices only" if is_spare else "")
        )
    with coordinator.lock:
        state = coordinator.membership.state
        state.lost = [number for number in state.lost if number not in replica_sets]
        state.num_revoked += back.num_revoked
        if 0 in with_values:
            coordinator.handing.uses_are_lost()
        coordinator.keep()


def _a_worker_is_gone(coordinator: Coordinator) -> bool:
    """Then what was acknowledged to it is not known any more."""
    gone = [*coordinator.membership.state.left, *coordinator.evicted]
    return any(name.startswith("worker-") for name in gone)


def _bring(
    coordinator: Coordinator,
    asking: Asking,
    lost: Sequence[int],
    replica_sets: Mapping[int, str],
    segments: Sequence[Segment],
) -> Back:
    """Each from where it loses less; a checkpoint that cannot be read is none."""
    copies = _copies(coordinator, lost)
    found = {number: freshest(copies, number) for number in lost}
    checkpoint, saved = _saved(coordinator)
    back = Back(checkpoint.name if checkpoint is not None else "", is_known=None not in found.values())
    if coordinator.config.pull_codec not in NONE:
        back.pull_codec = coordinator.config.pull_codec
    for number, one in found.items():
        if number in saved and is_no_older(saved[number], one[1] if one else None):
            back.from_disk[number] = saved[number]
    if checkpoint is not None and back.from_disk:
        try:
            asking.ask_servers(_to_take_up(checkpoint, back.from_disk, found, replica_sets))
        except StoreError as error:
            coordinator.event(f"{checkpoint.folder} cannot bring back what was lost: {error}")
            back.from_disk = {}
    for number, one in found.items():
        if number not in back.from_disk:
            if one is None:
                _give_up(coordinator, number, segments)
            back.from_workers[number] = one
    _have_them_brought(coordinator, back.from_workers, replica_sets)
    known = {number: one[1].known if one else 0 for number, one in found.items()}
    back.num_revoked = max(
        num_revoked(copy for _, copy in back.from_workers.values()),
        max((known[number] - part.version for number, part in back.from_disk.items()), default=0),
    )
    return back


def _saved(coordinator: Coordinator) -> tuple[Checkpoint | None, dict[int, SavedSlice]]:
    """The newest checkpoint of this very job, and the slices in it."""
    with coordinator.lock:
        last = coordinator.membership.state.saves.last
    if last is None:
        return None, {}
    try:
        manifest, _ = read_manifest(open_folder(last.folder), last.digest)
    except StoreError as error:
        coordinator.event(f"{last.folder} cannot bring back what was lost: {error}")
        return None, {}
    return last, {part.id: part for part in manifest.slices}


def _to_take_up(
    checkpoint: Checkpoint,
    parts: Collection[int],
    found: Mapping[int, Brought | None],
    replica_sets: Mapping[int, str],
) -> dict[str, Message]:
    mine: dict[str, list[int]] = {}
    for number in parts:
        mine.setdefault(replica_sets[number], []).append(number)
    known = {number: one[1].known if one else 0 for number, one in found.items()}
    return {
        name: Resume(checkpoint.folder, checkpoint.digest, numbers, True, known=[known[n] for n in numbers])
        for name, numbers in mine.items()
    }


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
    coordinator: Coordinator, chosen: Mapping[int, Brought], replica_sets: Mapping[int, str]
) -> None:
    pairs: dict[tuple[str, str], list[Copy]] = {}
    for number, (name, copy) in chosen.items():
        pairs.setdefault((name, replica_sets[number]), []).append(copy)
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
    if coordinator.config.is_ring:
        reason = (
            f"every process that had {shown} has ended: why is said above; with --checkpoint DIR the same command "
            "goes on from the last save"
        )
    with coordinator.lock:
        coordinator.membership.fail("server", reason)
    coordinator.ending.conclude()
    raise ConnectionLost(reason)
