"""A coordinator's twin: it decides as the real one does, by the core, over a simulated network and disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from syncline.core.liveness import Liveness
from syncline.core.members import Address, Member
from syncline.core.membership import Barriers, JobState, Membership
from syncline.core.reconfigure import Planner, Reconfiguration
from syncline.core.replica_sets import PlacementPlan, ReplicaSet
from syncline.core.ring import partner_of
from syncline.core.wire.control import Entered, Prepared
from syncline.errors import ConfigError

from .barriers import AtBarriers
from .ring import settled_otherwise
from .world import Frame, Session, StoreFull, Superseded

if TYPE_CHECKING:
    from .job import Job

ATTEMPT_SECONDS = 0.35
LOOK_SECONDS = 0.05
#: Answers may come apart by this part of a hold; how often servers are asked for closer ones.
APART, MOST_TIMES = 2 / 3, 5


class Coordinator(AtBarriers):
    """One term of the job's coordinator."""

    role = "coordinator"

    def __init__(self, job: Job) -> None:
        super().__init__(job.world, "coordinator")
        self.job = job

    def begin(self) -> None:
        self.term, data = self.world.disk.open()
        if data is None:
            state = JobState(config=self.job.config, leases=self.job.leases())
        else:
            state = msgspec.msgpack.decode(data, type=JobState)
        self.membership, self.state = Membership(state), state
        self.liveness = Liveness(least_seconds=1.0, most_seconds=4.0, suspect_seconds=0.3, asleep_seconds=0.15)
        for name in state.members:
            self.liveness.watch(name, self.world.now, full=True)
        self.barriers = Barriers(state.phase, state.passed)
        self.links: dict[str, Session] = {}
        self.released = 0
        self.deciding = Planner(self.membership)
        if state.formed:
            self.deciding.resume()
        self.leaving: dict[str, int] = {}
        self.at_barrier: dict[str, tuple[int, Session]] = {}
        self.attempt: dict[str, Any] | None = None
        self.restoring: dict[str, Any] | None = None
        self.seeding: dict[str, Any] | None = None
        self.seated = set[str]()
        self.departed = self.term > 1  # somebody may have left with the freshest copy
        self.num_keys = 0
        self.is_dirty = state.formed  # in this house every generation is installed, also one in which nobody moves
        self.later = 0.0
        self.num_failed = 0  # changes in a row that some server held no longer
        self.open_desk()
        self._look()

    # -- what it remembers --------------------------------------------------------------------------------

    def keep(self) -> bool:
        """Whether the state is on the disk; nobody is told of anything that is not."""
        try:
            self.world.disk.save(self.term, msgspec.msgpack.encode(self.state))
        except StoreFull:
            return False
        except Superseded:
            self.world.crash(self, restart=False)
            return False
        return True

    def say(self, name: str, kind: str, body: Any, generation: int | None = None) -> None:
        link = self.links.get(name)
        if link is not None and self.is_alive:
            number = self.state.generation if generation is None else generation
            self.answer(link, Frame(kind, "coordinator", 0, number, self.term, body))

    def _key(self) -> tuple[int, int]:
        self.num_keys += 1
        return (self.term, self.num_keys)

    # -- members ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for name, reason in self.liveness.dead(self.world.now):
            self.evict(name, reason)
        self.after(LOOK_SECONDS, self._look)
        self.look_at_leases()
        self.pump()

    def evict(self, name: str, reason: str) -> None:
        self._evict(name, reason)
        if self.job.scenario.is_ring and self.is_alive:
            self._evict(partner_of(name), "is in the same process")
        self.pump()

    def _evict(self, name: str, reason: str) -> None:
        member = self.state.members.get(name)
        self.liveness.forget(name)
        if member is None:
            return
        self.world.note("evict", name, reason)
        if member.role == "server":
            self.job.ledger.server_losses.append(self.world.now)
        self.membership.evict(name, reason)
        self.keep()  # as far as the disk takes it
        if not self.is_alive:
            return
        self.deciding.is_out(member)
        self.links.pop(name, None)
        self.at_barrier.pop(name, None)
        self.is_dirty = True
        self.seeding = self.handing_back = None
        if member.role == "worker":
            self.departed = True
            self.worker_is_out((name, member.incarnation))
        if member.role == "server" or self.restoring is not None:
            self.attempt = self.restoring = None

    def lost(self, session: Session) -> None:
        for name, link in list(self.links.items()):
            if link is session:
                del self.links[name]
                self.liveness.suspect(name, self.world.now, "closed")

    def died(self, name: str, life: str) -> None:
        """The launcher's word."""
        if self.state.processes.get(name) == life:
            self.liveness.gone(name, self.world.now, "its process ended")

    def on_join(self, session: Session, frame: Frame) -> None:
        role, name, life = frame.body
        known = self.state.processes.get(name)
        if known is not None and known != life:
            if session.other(self).is_alive:  # whoever starts a process under this name knows that it is dead
                self.liveness.gone(name, self.world.now, "was replaced")
            return
        before = self.state.incarnations
        if known is None:
            try:
                self.membership.join(role, name, "host", Address(life, "", 0), process=life)
            except ConfigError:
                return
            first = self.job.first_incarnations.get(name)
            if "reuse_incarnation" in self.job.bugs and first is not None:
                self.state.members[name] = msgspec.structs.replace(self.state.members[name], incarnation=first)
            self.job.first_incarnations.setdefault(name, self.state.incarnations)
            if not self.keep():
                del self.state.members[name], self.state.processes[name]
                self.state.incarnations = before
                return
            self.is_dirty = True
            self.liveness.watch(name, self.world.now)
        if not session.is_ghost:  # a replayed connection proves nothing, and is not the member's
            self.links[name] = session
        member = self.state.members[name]
        late = self.membership.formed and name not in self.state.entered
        if self.membership.formed:
            self._welcome(member, late)
        elif self.membership.may_form(False) and set(self.state.members) <= set(self.links):
            self._form()
        self.pump()

    def _welcome(self, member: Member, late: bool) -> None:
        assert member.address is not None
        body = {"process": member.address.unix, "incarnation": member.incarnation, "late": late}
        self.say(member.name, "joined", body)

    def _form(self) -> None:
        self.membership.form()
        servers = self.membership.servers()
        for number in range(self.job.scenario.slices):
            backup = servers[(number + 1) % len(servers)] if self.job.scenario.replicas > 1 else ""
            primary = servers[number % len(servers)]
            if self.job.scenario.is_ring:
                others = tuple(name for name in servers if name != primary)
                self.state.replica_sets[number] = ReplicaSet(number, primary, others)
                continue
            self.state.replica_sets[number] = ReplicaSet(
                number, primary, (backup,) if backup not in ("", primary) else ()
            )
        self.state.is_changing = True  # in this house the first generation is installed like any other
        if not self.keep():
            self.state.is_changing = False
            self.state.formed, self.state.generation, self.state.entered, self.state.replica_sets = False, 0, {}, {}
            return
        self.deciding.entering.update(dict.fromkeys(self.state.entered, 0))
        self.deciding.moves = self.is_dirty = True
        for member in self.membership.ordered():
            self._welcome(member, False)

    def on_beat(self, session: Session, frame: Frame) -> None:
        member = self.state.members.get(frame.name)
        if member is None or member.incarnation != frame.incarnation:
            self.answer(session, Frame("out", "coordinator", 0, 0, self.term, (frame.incarnation,)))
            return
        if session.is_broken:  # replayed, or already closed
            return
        self.links[frame.name] = session
        self.liveness.heard(frame.name, self.world.now)
        if frame.body:
            self.were_used(*frame.body)
        if member.role == "worker" and frame.generation < self.released:
            self._tell(frame.name)

    def on_old_term(self, session: Session, frame: Frame) -> None:
        self.world.crash(self, restart=False)

    def _is_member(self, frame: Frame) -> bool:
        return any((m.name, m.incarnation) == (frame.name, frame.incarnation) for m in self.state.members.values())

    def on_enter(self, session: Session, frame: Frame) -> None:
        if self._is_member(frame) and self.membership.formed and not session.is_broken:
            place = self.deciding.enter(frame.name, frame.incarnation, *frame.body)
            if place is not None:  # a second change would give it another place
                self._say_place(frame.name, frame.incarnation, frame.body[0], place)
            self.pump()

    def on_leave(self, session: Session, frame: Frame) -> None:
        if self._is_member(frame):
            self.membership.leave(frame.name)
            self.deciding.has_left(frame.name)
            self.liveness.forget(frame.name)
            self.is_dirty = self.departed = True
            self.seeding = None
        self.leaving[frame.name] = frame.incarnation
        if not session.is_ghost and frame.name not in self.state.members:  # else a later life has come meanwhile
            self.links[frame.name] = session
        if frame.name not in self.state.fencing and frame.name in self.state.left and not self.is_dirty:
            self.say(frame.name, "left", (frame.incarnation,))
        self.pump()

    # -- what is to be done -------------------------------------------------------------------------------

    def pump(self) -> None:
        if not self.membership.formed or not self.is_alive or self.attempt is not None:
            return
        if self.handing_back is not None or self.is_cutting():
            return
        if self.world.now < self.later or not self.membership.servers():
            return
        self.deciding.strangers.clear()  # nobody needs to be told of the layout
        if self.is_dirty or self.deciding.is_urgent:
            self._begin(None)
        elif not self.hand_back() and self.seeding is None:
            self._plan()

    def _wait(self, seconds: float) -> None:
        self.later = self.world.now + seconds
        self.after(seconds + 1e-6, self.pump)

    def _begin(self, wanted: PlacementPlan | None) -> None:
        """Decides on the next generation, keeps it, and has every server prepare."""
        self.seeding = None
        change = self.deciding.begin(wanted, self.sizes())
        if change is None:
            return
        bugs = self.job.bugs
        skips = ("no_generation" in bugs) or ("promote_unkept" in bugs and change.moves)
        if not skips and not self.keep():
            self._wait(0.05)
            return
        if "joiner_counts" in bugs:
            self.state.replica_sets_before = {}
        if "old_barrier_epoch" in bugs:
            change.phase = 0
        if "forget_standings" in bugs:
            change.staying = {}
        attempt = self.attempt = {"change": change, "installed": set(), "install": None, "plan": wanted, "times": 0}
        self.is_dirty = False
        if self.state.lost and self.job.scenario.is_ring:
            self._nobody_has(self.state.lost)
        elif self.state.lost:
            self._restore(attempt)
        else:
            self._prepare(attempt)

    def _prepare(self, attempt: dict[str, Any]) -> None:
        change: Reconfiguration = attempt["change"]
        self._ask_all(attempt)
        if "release_early" in self.job.bugs and not self.job.is_new:
            self._finish(change)
            return
        self.after(ATTEMPT_SECONDS, lambda: self._give_up(attempt))

    def _ask_all(self, attempt: dict[str, Any]) -> None:
        """Asked once more where the answers come so far apart that the first hold may be over."""
        self.job.change_is_under_way()
        attempt.update(asked=self.world.now, heard=set(), times=attempt["times"] + 1)
        for server in attempt["change"].servers:
            self.say(server, "prepare", attempt["change"].prepare(self.num_failed))

    def _is_under_way(self, change: Reconfiguration) -> bool:
        return self.attempt is not None and self.attempt["change"] is change

    def _give_up(self, attempt: dict[str, Any]) -> None:
        if self.attempt is attempt:
            self.attempt, self.is_dirty = None, True
            self.pump()

    def on_prepared(self, session: Session, frame: Frame) -> None:
        generation, answer = frame.body
        attempt = self.attempt
        if attempt is None or attempt["change"].generation != generation or attempt["install"] is not None:
            return
        change: Reconfiguration = attempt["change"]
        if frame.name not in change.servers:
            return
        change.prepared(frame.name, answer)
        attempt["heard"].add(frame.name)
        if attempt["heard"] < set(change.servers):
            return
        apart = self.world.now - attempt["asked"] >= APART * self.job.scenario.hold_seconds
        if apart and attempt["times"] < MOST_TIMES:
            self._ask_all(attempt)
            return
        if attempt["plan"] is not None and change.num_orphans:
            self.attempt = None
            self.deciding.take_back()
            self.keep()
            for server in change.servers:
                self.say(server, "let_go", (change.generation,))
            self._wait(0.2)
            return
        if "enter_one_server" in self.job.bugs:
            first: Prepared = change.answers[next(iter(change.servers))]
            turn = max([(change.phase, 0), *(s.turn() for s in first.standings)])
            change.turn = lambda: turn  # type: ignore[method-assign]
        if self.job.bugs & {"settle_by_most", "settle_by_any"}:
            change.settle = lambda: settled_otherwise(change, self.job.bugs)  # type: ignore[method-assign]
        install, losses = self.deciding.install(change)
        for loss in losses:
            self.job.ledger.report_double(loss.workers, loss.text)
        if "settle_fenced_only" in self.job.bugs:
            install = msgspec.structs.replace(install, settle=[s for s in install.settle if s[0] in change.fenced])
        attempt["install"] = install
        self.job.change_is_under_way()
        for server in change.servers:
            self.say(server, "install", attempt["install"])

    def on_not_held(self, session: Session, frame: Frame) -> None:
        if self.attempt is not None and self.attempt["change"].generation == frame.body[0]:
            self.attempt, self.is_dirty = None, True
            self.num_failed += 1
            self._wait(0.02)

    def on_installed(self, session: Session, frame: Frame) -> None:
        attempt = self.attempt
        if attempt is None or attempt["change"].generation != frame.body[0]:
            return
        attempt["installed"].add(frame.name)
        if attempt["installed"] >= set(attempt["change"].servers):
            self._finish(attempt["change"])

    def _finish(self, change: Reconfiguration) -> None:
        """Every server has it: rounds, barriers and places are others' from now on."""
        state = self.state
        self.deciding.settle(change)
        if not self.keep():
            self.deciding.reopen()
            self.attempt = None
            self._wait(0.05)
            return
        self.attempt, self.released, self.num_failed = None, change.generation, 0
        self.seated = {name for replica_set in change.replica_sets for name in replica_set.names}
        entries = dict(self.deciding.entering)
        places = self.deciding.finish(change)
        if self.job.is_new:
            self.job.is_new, self.job.first_generation = False, change.generation
        self.job.released(self, change)
        for name in self.links:
            self._tell(name)
        for name, place in places.items():
            self._say_place(name, change.entering[name], entries[name], place)
        for name, incarnation in self.leaving.items():
            if name in state.left and name not in state.fencing:
                self.say(name, "left", (incarnation,))
        self._release_barriers()
        self.pump()

    def _say_place(self, name: str, incarnation: int, entry: int, place: Entered) -> None:
        self.say(name, "entered", (incarnation, entry, place.phase, place.back_at))

    def _tell(self, name: str) -> None:
        replica_sets = {number: replica_set.primary for number, replica_set in self.state.replica_sets.items()}
        if self.job.scenario.is_ring:  # workers commit at all servers, also at those that are nobody's primary
            names = {name for replica_set in self.state.replica_sets.values() for name in replica_set.names}
            replica_sets |= {-1 - k: name for k, name in enumerate(sorted(names.difference(replica_sets.values())))}
        if self.released == self.state.generation:
            self.say(name, "roster", (self.released, self.membership.ordered(), replica_sets))
