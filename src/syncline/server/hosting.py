"""What a server hosts: the segments it knows, the slices it is the primary of, and backups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from syncline.config import JobConfig
from syncline.core.layout import Segment, Slice, aligned
from syncline.core.members import Member, Standing
from syncline.core.replica_sets import ReplicaSet
from syncline.core.ring import HostLeaders, Spread, host_leaders_of
from syncline.core.slice_state import Copy, Identity, SliceState, highest_clocks, least_clocks, life_of, reach_of
from syncline.core.wire.control import Host
from syncline.errors import FencedError, ProtocolError, SynclineError
from syncline.net.reliable_send import Partner
from syncline.net.rpc import Endpoint
from syncline.net.transport import Memory, Peer, buffer_of
from syncline.server.admission_queue import CutHolds
from syncline.server.backups import Backups
from syncline.server.commits import Commits
from syncline.server.pool import Pool
from syncline.server.pulls import Pulls
from syncline.server.seeding import alone_replica, supply
from syncline.server.slices import HostedSlice
from syncline.server.storage import Blocks, SliceStorage
from syncline.stats import ServerStats, WireStats

#: Slices that a server names as its busiest.
MOST_BUSIEST = 3


def stats_of(
    name: str, slots: Collection[HostedSlice], commits: Commits | None, pulls: Pulls, wire: WireStats
) -> ServerStats:
    """Statistics of this server; `commits` is None before the job is formed."""
    flow = commits.flow if commits else None
    cuts = commits.admission_queue.cut_holds if commits else CutHolds()
    return ServerStats(
        name=name,
        num_slices=len(slots),
        parameter_bytes=sum(slot.part.num_bytes for slot in slots),
        num_updates=sum(slot.num_updates for slot in slots),
        most_updates=max((slot.state.version for slot in slots), default=0),
        num_commits=commits.num_commits if commits else 0,
        num_late=commits.num_late if commits else 0,
        apply_seconds=sum(slot.apply_seconds for slot in slots),
        num_rounds=flow.num_rounds if flow else 0,
        round_seconds=flow.round_seconds if flow else 0.0,
        bytes_copied=pulls.bytes_copied,
        staleness_sum=float(sum(slot.staleness_sum for slot in slots)),
        staleness_count=sum(slot.staleness_count for slot in slots),
        staleness_max=max((slot.staleness_max for slot in slots), default=0),
        staleness_counts=tuple(map(sum, zip(*(slot.staleness_counts for slot in slots), strict=True))),
        busiest=tuple(
            sorted(((slot.part.id, slot.apply_seconds) for slot in slots), key=lambda found: -found[1])[:MOST_BUSIEST]
        ),
        damping_sum=sum(slot.damping_sum for slot in slots),
        lag_max=flow.lag_max if flow else 0,
        num_pins=pulls.num_pins,
        num_cuts=cuts.num,
        cut_seconds=cuts.seconds,
        cut_seconds_max=cuts.seconds_max,
        wire=wire,
    )


Dial = Callable[[Member], Endpoint]


class Hosting:
    """The slices of a server, by their role here."""

    def __init__(
        self,
        pool: Pool,
        storage: SliceStorage,
        *,
        create_memory: Callable[[int], Memory],
        dial: Dial,
        log: Callable[[str], None],
    ) -> None:
        self._pool, self.storage, self._dial, self._log = pool, storage, dial, log
        self.create_memory = create_memory
        self.name = ""
        self.segments: dict[int, Segment] = {}
        self._parts: dict[int, tuple[Segment, Slice]] = {}
        self.slices: dict[int, HostedSlice] = {}  # whose primary is this server
        self._arriving: dict[int, HostedSlice] = {}  # whose primary is this server from the next generation on
        self.blocks = Blocks(create_memory, storage, log)
        self.backups = Backups(self.blocks, pool, storage, find=self.find, check_sender=self.check_sender)
        self.replica_sets: dict[int, ReplicaSet] = {}
        self._primaries: dict[int, str] = {}  # by slice: the incarnation of its primary
        self._members: dict[str, Member] = {}
        self._partners: dict[Identity, Partner] = {}
        self._partners_lock = threading.Lock()
        self._out: set[Identity] = set()  # servers whose updates are refused

    def find(self, number: int) -> tuple[Segment, Slice]:
        """Finds a slice of the layout, hosted here or not."""
        found = self._parts.get(number)
        if found is None:
            raise ProtocolError(f"{self.name} knows of no slice {number}")
        return found

    @property
    def num_slices(self) -> int:
        return len(self._parts)

    def knows(self, number: int) -> bool:
        return number in self._parts

    def primary(self, number: int) -> HostedSlice:
        slot = self.slices.get(number) or self._arriving.get(number)
        if slot is None:
            raise ProtocolError(f"{self.name} does not host slice {number}")
        return slot

    # -- hosting ------------------------------------------------------------------------------------------

    def make_room(self, message: Host) -> dict[int, HostedSlice]:
        """Allocates a block for new slices. Existing ones are kept."""
        segment = message.segment
        known = self.segments.get(segment.index) == segment
        wanted = [
            part
            for part in segment.slices
            if part.id in message.slices and not (known and (part.id in self.slices or part.id in self._arriving))
        ]
        made: dict[int, HostedSlice] = {}
        if wanted:
            block, offset = self.blocks.make(sum(aligned(part.num_bytes) for part in wanted)), 0
            try:
                for part in wanted:
                    view = self.blocks.take(block, part, offset)
                    made[part.id] = HostedSlice(segment, part, view, self.storage)
                    offset += aligned(part.num_bytes)
            except SynclineError:
                self.blocks.drop(part.id for part in wanted)
                raise
            finally:
                self.blocks.let_go(block)
        return made

    def host(self, segment: Segment, made: dict[int, HostedSlice]) -> bool:
        """Hosts slices, between two commits. Returns whether they are active now: slices of a new segment are; others
        wait for the generation that makes this server their primary.
        """
        known = self.segments.get(segment.index)
        if known == segment:
            self._arriving.update(made)
            return False
        if known is not None:  # taken back before: not all servers could host it
            for part in known.slices:
                self._parts.pop(part.id, None)
                self.slices.pop(part.id, None)
        self.segments[segment.index] = segment
        self._parts.update((part.id, (segment, part)) for part in segment.slices)
        self.slices.update(made)
        return True

    def restore(self, copy: Copy, values: memoryview, standings: Iterable[Standing]) -> None:
        """Restores a lost slice from a worker's copy. Idempotent."""
        slot = self.primary(copy.slice)
        with slot.lock:
            if slot.uploaded:
                return
            buffer_of(slot.memory)[:] = values
            slot.rules.uploaded()
            slot.state.version = max(copy.known, copy.version)
            lives = {life_of(s.name, s.incarnation): (s.name, s.incarnation) for s in standings}
            slot.state.clocks = {lives[life]: clock for life, clock in copy.clocks.items() if life in lives}
            slot.uploaded, slot.copied = True, dict(copy.clocks)

    # -- replica sets --------------------------------------------------------------------------------------------

    def hear(self, members: Sequence[Member], replica_sets: Iterable[ReplicaSet]) -> None:
        """Updates members and replica sets."""
        self._members = {member.name: member for member in members}
        for replica_set in replica_sets:
            if replica_set.slice not in self.replica_sets:  # those of a generation count when it is installed
                self._sit(replica_set)

    def _sit(self, replica_set: ReplicaSet) -> None:
        self.replica_sets[replica_set.slice], self._primaries[replica_set.slice] = (
            replica_set,
            self._life_of(replica_set.primary),
        )

    def _life_of(self, server: str) -> str:
        member = self._members.get(server)
        return life_of(server, member.incarnation) if member is not None else ""

    def check_sender(self, peer: Peer, number: int) -> None:
        """Refuses updates from servers other than the slice's primary. A former primary that does not know yet is
        accepted.
        """
        if (peer.name, peer.incarnation) in self._out:
            raise FencedError(f"{peer}, incarnation {peer.incarnation}, is out")
        if number in self._arriving:
            raise FencedError(f"slice {number} is hosted again by {self.name}")
        if self.backups.was_of(number, peer.name):
            return
        replica_set, member = self.replica_sets.get(number), self._members.get(peer.name)
        if replica_set is not None and replica_set.primary != peer.name:
            raise FencedError(f"{peer} is not the primary of slice {number}; {replica_set.primary or 'no server'} is")
        if number in self.slices:
            raise FencedError(f"{self.name} itself is the primary of slice {number}")
        if member is not None and member.incarnation > peer.incarnation > 0:
            raise FencedError(f"{peer}, incarnation {peer.incarnation}, has been replaced")

    def partner(self, member: Member) -> Partner:
        """The connection to another server; created once."""
        key = (member.name, member.incarnation)
        with self._partners_lock:
            found = self._partners.get(key)
            if found is None:
                mine = self._members.get(self.name)
                found = self._partners[key] = Partner(
                    member,
                    self._dial,
                    is_of_our_kind=mine is not None and mine.kind == member.kind,
                    submit=self._pool.submit,
                    log=self._log,
                )
        return found

    def servers(self) -> list[Member]:
        return [member for member in self._members.values() if member.role == "server"]

    def members_named(self, names: Collection[str]) -> list[Member]:
        return [self._members[name] for name in names if name in self._members]

    def copies(self) -> list[HostedSlice]:
        """All slices here, primaries and backups."""
        return [*self.slices.values(), *self.backups.slots()]

    def host_leaders_by(self, config: JobConfig) -> HostLeaders | None:
        """In a ring: the host leaders by the current replica sets."""
        return host_leaders_of(config, dict(self.replica_sets), list(self._members.values()))

    def spread_by(self, spread: Spread) -> frozenset[int]:
        """In a ring: the spread slices by the current replica sets."""
        hosts = {member.name: member.host for member in self._members.values()}
        return spread.of(self._parts.values(), self.replica_sets, hosts)

    def partners_named(self, names: Collection[str]) -> list[Partner]:
        """The connections to these servers, without this one."""
        others = [self._members[name] for name in sorted(names) if name in self._members and name != self.name]
        return [self.partner(member) for member in others]

    def supply(self, goes_on: Callable[[], bool]) -> None:
        """In a ring, during a reconfiguration: sends new backups the data they lack. Nothing is applied meanwhile."""
        for partner in list(self._partners.values()):
            supply(partner, list(self.slices.values()), goes_on)

    def fence_servers(self, there: Collection[Identity], generation: int) -> None:
        """Accepts only updates from the servers `there`. Updates of others that have arrived are processed first.
        Servers that joined since are not affected.
        """
        known = {(m.name, m.incarnation) for m in self.servers() if m.since <= generation}
        self._out |= known.difference(there) if there else set()

    def fence(self, workers: Collection[Identity]) -> None:
        """Fences workers on every copy here."""
        for slot in self.copies() if workers else ():
            with slot.lock:
                for worker in workers:
                    slot.state.fence(worker)

    def release_backups(self, replica_sets: Iterable[ReplicaSet]) -> None:
        """The replica sets are journaled: slices whose backup is gone no longer wait for its acknowledgements."""
        alone = []
        for replica_set in replica_sets:
            slot = self.slices.get(replica_set.slice)
            if slot is None or replica_set.primary != self.name:
                continue
            for replica in slot.replicas:
                if replica.partner.name in replica_set.backups:
                    replica.is_named = True
                elif replica.is_seeding:
                    continue  # a seeding in progress, which no replica set contains yet
                else:  # any other copy: no replica set contains it
                    slot.stand_alone(replica.partner)
                    alone.append(slot)
        for slot in alone:
            self._pool.submit(slot.drain)

    def has_all(self) -> bool:
        """Whether all slices that the replica sets place here are complete."""
        mine = [number for number, replica_set in dict(self.replica_sets).items() if self.name in replica_set.names]
        return all(number in self.slices or self.backups.slot_of(number) is not None for number in mine)

    def leaving(self, replica_sets: Iterable[ReplicaSet]) -> list[int]:
        """The slices whose primary will no longer be this server."""
        return [
            replica_set.slice
            for replica_set in replica_sets
            if replica_set.slice in self.slices and replica_set.primary != self.name
        ]

    def take_replica_sets(self, replica_sets: Sequence[ReplicaSet], members: Sequence[Member]) -> list[Partner]:
        """Installs the replica sets of a generation while no update of the affected slices is in flight. Returns the
        connections that are no longer needed.
        """
        self.hear(members, ())
        for replica_set in replica_sets:
            before = self.replica_sets.get(replica_set.slice)
            self._sit(replica_set)
            if replica_set.primary == self.name:
                self._become_primary(replica_set, before)
            else:
                self._become_other(replica_set)
        there = {(member.name, member.incarnation) for member in members}
        self.backups.shared_regions.forget_but(set(self._members))
        with self._partners_lock:
            return [self._partners.pop(key) for key in list(self._partners) if key not in there]

    def _become_primary(self, replica_set: ReplicaSet, before: ReplicaSet | None) -> None:
        slot = self.slices.get(replica_set.slice)
        if slot is None:
            slot = self._arriving.pop(replica_set.slice, None)
            if slot is not None:
                self.backups.take_out(replica_set.slice)  # hosted again: a copy outside the replica sets is worthless
            else:
                slot = self.backups.promote(replica_set.slice)
            if slot is None:
                self._log(f"slice {replica_set.slice} is said to be here, and is not")
                return
            slot.state.pins = 0
            self.slices[replica_set.slice] = slot
        for name in replica_set.backups:
            backup = self._members.get(name)
            if backup is not None and slot.replica_on(name) is None:
                replica = alone_replica(self.partner(backup), slot)
                replica.is_named = True
                replica.is_new = name not in before.names if before is not None else True
                with slot.lock:
                    slot.state.stand_apart()
                    slot.replicas = [*slot.replicas, replica]

    def _become_other(self, replica_set: ReplicaSet) -> None:
        slot = self.slices.pop(replica_set.slice, None)
        if slot is not None:
            slot.stand_alone()
            slot.drain()
            with slot.lock:
                slot.rules.about_to_change(waits=False)  # its memory may be gone
        self._arriving.pop(replica_set.slice, None)
        if self.name in replica_set.backups:
            if slot is not None:
                self.backups.put_in(slot, replica_set.primary)
            elif replica_set.slice in self.backups.backups:
                self.backups.backups[replica_set.slice].is_named = True
            return
        backup = self.backups.backups.get(replica_set.slice)
        if backup is not None and not (backup.is_named or backup.primary != replica_set.primary):
            return  # its primary is seeding it right now
        self.backups.take_out(replica_set.slice)
        self.blocks.drop([replica_set.slice])

    def most_updates(self) -> int:
        """The highest update count of any copy here."""
        return max((_state_of(slot).version for slot in self.copies()), default=0)

    def highest_clocks(self) -> dict[Identity, int]:
        """Every worker's latest commit on any copy here."""
        return highest_clocks(_state_of(slot).clocks for slot in self.copies())

    def reach(
        self, replica_sets: Iterable[ReplicaSet], fenced: Iterable[Identity], staged: Callable[[Identity], int]
    ) -> list[tuple[str, int, int, str]]:
        """The clocks that slices here can reach with staged commits of removed workers."""
        own = self._life_of(self.name)
        states = {own: [_state_of(slot) for slot in self.slices.values() if slot.uploaded]}
        for replica_set in replica_sets:
            if replica_set.primary == self.name and replica_set.slice not in self.slices:
                slot = self._arriving.get(replica_set.slice) or self.backups.slot_of(replica_set.slice)
                if slot is not None and slot.uploaded:
                    states.setdefault(self._primaries.get(replica_set.slice, ""), []).append(_state_of(slot))
        return reach_of(states, own, fenced, staged)

    def clocks(
        self, standings: Iterable[Standing], staying: Iterable[Identity], in_rounds: bool
    ) -> dict[Identity, int]:
        """Every worker's clock that all slices here have. Slices without values begin at the level of the others.

        `staying`: workers that took part when the slices restored from copies were lost.
        """
        given = {(s.name, s.incarnation): s.clock for s in standings}
        restored = [slot for slot in self.slices.values() if slot.copied is not None]
        for slot in restored:
            for name, incarnation in staying:
                clock = slot.copied.get(life_of(name, incarnation)) if slot.copied is not None else None
                if clock is not None and (name, incarnation) not in slot.state.clocks:
                    slot.state.level({(name, incarnation): clock})
        slots = list(self.slices.values()) or self.backups.slots()
        used = [s.state for s in slots if s.uploaded and (s.copied is None or s.state.clocks)]
        found = least_clocks(used) if used else given
        if in_rounds:
            # Workers with steps that no slice here knows joined these slices late; their last commit may be open.
            heard = {worker for state in used for worker in state.clocks}
            found.update((worker, clock - 1) for worker, clock in given.items() if worker not in heard and clock > 1)
        for slot in self.slices.values():
            if not slot.uploaded:
                slot.state.level(found)
        return found

    def close_ways(self) -> None:
        with self._partners_lock:
            partners = list(self._partners.values())
        for partner in partners:
            partner.close()

    def close(self) -> None:
        self.blocks.close()


def _state_of(slot: HostedSlice) -> SliceState:
    """A consistent copy of the state, which changes on a backup."""
    with slot.lock:
        return SliceState(slot.state.version, slot.state.clocks, slot.state.fences)
