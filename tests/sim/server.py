"""A server's twin: how it goes from generation to generation, and gives slices to others."""

from __future__ import annotations

import msgspec

from syncline.core.members import Member
from syncline.core.slice_state import SliceState, highest_clocks, least_clocks, life_of, reach_of
from syncline.core.wire.control import Install, Prepare, Prepared

from .gating import Gated
from .hosting import Hosted, Identity
from .world import Frame, Session


class Server(Gated):
    """Hosts slices, as primary or backup."""

    # -- changes ------------------------------------------------------------------------------------------

    def _holds(self) -> bool:
        return self.hold_until > self.world.now or self.installing is not None

    def on_prepare(self, session: Session, frame: Frame) -> None:
        change: Prepare = frame.body
        if not self.heed(session, frame):
            return
        if change.generation < max(self.prepared, self.generation):
            return
        if change.generation == self.generation:
            self.reply(session, "installed", (change.generation,))
            return
        if "gate_over_prepare" not in self.job.bugs:
            self.open_gate()
        if not self.opened:
            self._reset()
        self.prepared, self.installing, self.change = change.generation, None, change
        known = {(m.name, m.incarnation) for m in self.members.values() if m.role == "server"}
        self.out |= known.difference(map(tuple, change.servers))
        if "skip_fence" not in self.job.bugs:
            for name, incarnation in change.fenced:
                self.rounds.fence(name, incarnation)
                if "keep_undecided" not in self.job.bugs:
                    self.rounds.drop_undecided(name, incarnation)
        if self.seeding is not None:
            self.seeding = None
        self.freeze(change)
        for replica_set in change.replica_sets:
            hosted = self.hosted.get(replica_set.slice)
            if hosted is not None:
                kept = set(replica_set.names)
                hosted.targets = {life: name for life, name in hosted.targets.items() if name in kept}
                hosted.sent.clear()  # said again, in the new generation
        seconds = self.job.scenario.hold_seconds * change.times
        self.hold_until = self.world.now + seconds
        self.preparing = (session, change)
        self.after(seconds + 1e-4, self._hold_ends)
        self.pump()

    def freeze(self, change: Prepare) -> None:
        """Before backups are released: in a ring those who leave have their say still."""

    def on_let_go(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame) and self.prepared == frame.body[0] and self.installing is None:
            self.hold_until = 0.0
            self._hold_ends()

    def _hold_ends(self) -> None:
        if not self._holds():
            self.preparing = None
            self._let_go()

    def _is_idle(self) -> bool:
        return not any(self.hosted[n].queue for n in self.primaries())

    def _go_on(self) -> None:
        """What waited for the queues to be empty."""
        if self.preparing is not None and self._is_idle():
            session, change = self.preparing
            self.preparing = None
            self.reply(session, "prepared", (change.generation, self._standing_of_all(change)))
        elif self.installing is not None and not self.is_settling and self._is_idle():
            self._switch()
        else:
            self.tell_closed()

    def _standing_of_all(self, change: Prepare) -> Prepared:
        standings = [msgspec.structs.replace(s) for s in self.rounds.standings.values()]
        for _, held in self.held:
            if held.kind == "commit" and held.body[2] is not None:
                self.rounds.learn(held.body[2])
        clocks = highest_clocks(hosted.state.clocks for hosted in self.hosted.values())
        return Prepared(
            standings, self.rounds.num_orphans(), [(*who, clock) for who, clock in clocks.items()],
            self._reach(change), bool(self.primaries()), self.rounds.round_memberships.entries(),
        )  # fmt: skip

    def _staged_whole(self, who: Identity) -> int:
        clock = self.rounds.reach(*who)
        while (item := self.staged.get(who, {}).get(clock + 1)) and item.slices.issuperset(self.primaries()):
            clock += 1
        return clock

    def _reach(self, change: Prepare) -> list[tuple[str, int, int, str]]:
        will_be = {replica_set.slice for replica_set in change.replica_sets if replica_set.primary == self.name}
        states: dict[str, list[SliceState]] = {}
        for number, hosted in self.hosted.items():
            primary = self.members.get(self.replica_sets[number].primary) if number in self.replica_sets else None
            if number in will_be or (primary is not None and primary.name == self.name):
                life = life_of(primary.name, primary.incarnation) if primary is not None else ""
                states.setdefault(life, []).append(hosted.state)
        mine = life_of(self.name, self.incarnation)
        return reach_of(states, mine, [(n, i) for n, i in change.fenced], self._staged_whole)

    def on_install(self, session: Session, frame: Frame) -> None:
        install: Install = frame.body
        if not self.heed(session, frame):
            return
        if install.generation == self.generation:
            self.reply(session, "installed", (install.generation,))
            return
        late = not self._holds() and "install_late" not in self.job.bugs
        if install.generation != self.prepared or self.change is None or late:
            self.reply(session, "not_held", (install.generation,))
            return
        if self.installing is not None:
            self.installing = (session, install)
            return
        self.installing, self.preparing, self.is_settling = (session, install), None, True
        self.rounds.decides = self.rounds.decides and not self.change.moves
        for round_membership in install.round_memberships if "memberships_untold" not in self.job.bugs else ():
            self.rounds.learn(round_membership)
        if "no_settle" not in self.job.bugs:
            for name, incarnation, clock in install.settle:
                self._settle(name, incarnation, clock)
        for name, incarnation in self.change.fenced:
            self._take(self.rounds.leave_fenced(name, incarnation))
        self.is_settling = False
        self.pump()

    def _settle(self, name: str, incarnation: int, until: int) -> None:
        standing = self.rounds.standings.get(name)
        if standing is None or standing.incarnation != incarnation or standing.left:
            return
        while standing.clock < until:
            clock = standing.clock + 1
            item = self.staged.get((name, incarnation), {}).get(clock)
            if item is None or not item.slices.issuperset(self.primaries()):
                return
            if not self.rounds.is_decided(name, incarnation, clock):
                return
            standing.fenced = standing.fenced or "skip_fence" in self.job.bugs
            if standing.fenced:
                self._take(self.rounds.settle(name, clock, item.phase, item, item.back_at))
            else:
                self._take(self.rounds.commit(name, incarnation, clock, item.phase, item, item.back_at))

    def _switch(self) -> None:
        """All that was settled is applied, here and on the backups: the generation begins."""
        assert self.installing is not None and self.change is not None
        (session, install), change = self.installing, self.change
        self.installing, self.hold_until = None, 0.0
        self.generation = install.generation
        self.replica_sets_before, self.replica_sets = (
            self.replica_sets,
            {replica_set.slice: replica_set for replica_set in change.replica_sets},
        )
        self.members = {member.name: member for member in install.members}
        settled = {(n, i): c for n, i, c in install.settle}
        for name, incarnation in change.fenced:
            self.limits[name, incarnation] = settled.get((name, incarnation), 0)
            self.fences[name] = max(incarnation, self.fences.get(name, 0))
        self._host(change)
        self.rounds.decides = 0 in self.primaries()
        self.rounds.is_alone = sum(member.role == "server" for member in install.members) == 1
        if change.moves:
            self.standings, self.opened = [msgspec.structs.replace(s) for s in install.standings], False
            self._reset()
            self.held = []
        else:
            if not self.opened:  # nobody has spoken since primaries changed
                new = {s.name: msgspec.structs.replace(s) for s in install.standings}
                out = set(new) | {n for n, i in change.fenced if i >= self.incarnation_of(n)}
                self.standings = [s for s in self.standings if s.name not in out] + list(new.values())
                self._reset()
            for standing in install.standings:
                self.rounds.enter(msgspec.structs.replace(standing))
                self.entered_in[standing.name] = install.generation
            self._take(self.rounds.release())
            self._let_go()
        self.say_installed(session, install.generation)
        self.pump()

    def say_installed(self, session: Session, generation: int) -> None:
        self.reply(session, "installed", (generation,))

    def _host(self, change: Prepare) -> None:
        for replica_set in change.replica_sets:
            if self.name not in replica_set.names:
                known = self.hosted.get(replica_set.slice)
                if known is not None and known.since < change.generation:  # else it was brought for a later one
                    del self.hosted[replica_set.slice]
                continue
            if replica_set.slice not in self.hosted:
                if not self.job.is_new and change.generation > self.job.first_generation:
                    self.job.ledger.fail(f"{self.life} gets slice {replica_set.slice}, which it does not have")
                self.hosted[replica_set.slice] = Hosted()
            hosted = self.hosted[replica_set.slice]
            hosted.targets = {}
            hosted.sent.clear()
            hosted.acks.clear()
            for backup in replica_set.backups if replica_set.primary == self.name else ():
                hosted.targets[self.members[backup].address.unix] = backup
            if "skip_fence" not in self.job.bugs:
                for name, incarnation in change.fenced:
                    hosted.state.fence((name, incarnation))

    def incarnation_of(self, name: str) -> int:
        return max((s.incarnation for s in self.standings if s.name == name), default=0)

    def _reset(self) -> None:
        """Open commits are given back, to be made again: the clocks on each slice decide what is new there."""
        states = [self.hosted[n].state for n in self.primaries()]
        clocks = least_clocks(states)
        if not states:
            clocks = {(s.name, s.incarnation): s.clock for s in self.standings}
        self.rounds.reset([msgspec.structs.replace(s) for s in self.standings], clocks)
        self.staged.clear()
        for hosted in self.hosted.values():
            hosted.queue.clear()
        waiting, self.waiting = self.waiting, {}
        for requests in waiting.values():
            for session, request in requests:
                self.reply(session, "refresh", (request,))
        held, self.held = self.held, []
        for session, frame in held:
            self.reply(session, "refresh", (frame.body[0],))

    def on_retired(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame):
            self.world.crash(self, restart=False)

    def take_roster(self, generation: int, members: list[Member], replica_sets: dict[int, str]) -> None:
        for name in [n for n, s in self.rounds.standings.items() if s.left]:
            self.rounds.forget_left(name)

    # -- seeds and copies ---------------------------------------------------------------------------------

    def on_seed_to(self, session: Session, frame: Frame) -> None:
        key, slices, target = frame.body
        if not self.heed(session, frame) or frame.generation != self.generation or self.prepared > self.generation:
            return
        self.seeding = {"session": session, "key": key, "left": list(slices), "life": target.address.unix,
                        "name": target.name, "all": list(slices)}  # fmt: skip
        self._seed_next()

    def _seed_next(self) -> None:
        seeding = self.seeding
        assert seeding is not None
        if not seeding["left"]:
            self.seeding = None  # from now on its updates are awaited until the coordinator's next word
            self.reply(seeding["session"], "seeded", (seeding["key"],))
            return
        number = seeding["left"][0]
        hosted = self.hosted[number]
        clocks = [] if "clocks_apart" in self.job.bugs else hosted.state.clock_entries()
        acks = [] if "uses_unseeded" in self.job.bugs else hosted.state.ack_entries()
        late = [] if "uses_unseeded" in self.job.bugs else hosted.state.late_entries()
        body = (number, hosted.state.version, clocks, hosted.state.fence_entries(), dict(hosted.ledger),
                hosted.epoch, hosted.digest, seeding["key"], acks, late)  # fmt: skip
        self.send(seeding["life"], self.frame("seed", body))
        if "no_tail" not in self.job.bugs:
            hosted.targets[seeding["life"]] = seeding["name"]
            hosted.acks.discard(seeding["life"])
            hosted.sent.discard(seeding["life"])

    def _seed_failed(self) -> None:
        assert self.seeding is not None
        seeding, self.seeding = self.seeding, None
        for number in seeding["all"]:
            hosted = self.hosted.get(number)
            replica_set = self.replica_sets.get(number)
            if hosted is not None and replica_set is not None and seeding["name"] not in replica_set.backups:
                hosted.targets.pop(seeding["life"], None)
        self.reply(seeding["session"], "seed_failed", (seeding["key"],))

    def on_seed(self, session: Session, frame: Frame) -> None:
        number, version, clocks, fences, ledger, epoch, digest, key, acks, late = frame.body
        known = self.hosted.get(number)
        old = known is not None and (known.epoch, known.state.version) > (epoch, version)
        replica_set = self.replica_sets.get(number)
        mine = replica_set is not None and self.name in replica_set.names
        if frame.generation < max(self.prepared, self.generation) or old or mine:
            return
        hosted = self.hosted[number] = Hosted(epoch)
        hosted.state.take_over(version, clocks, fences, acks, late)
        hosted.ledger, hosted.digest = dict(ledger), digest
        self.reply(session, "seed_done", (number, key))

    def on_seed_done(self, session: Session, frame: Frame) -> None:
        seeding = self.seeding
        number, key = frame.body
        if seeding is not None and seeding["key"] == key and seeding["left"] and seeding["left"][0] == number:
            seeding["left"].pop(0)
            self.after(0.005, lambda: self._seed_next() if self.seeding is seeding else None)

    def on_restore(self, session: Session, frame: Frame) -> None:
        """A worker's copy of a slice that no server has."""
        key, number, version, clocks, ledger, epoch, digest, generation = frame.body
        known = self.hosted.get(number)
        if known is not None and known.epoch >= epoch:
            if known.epoch == epoch:
                self.reply(session, "restored", (key, number))
            return
        hosted = self.hosted[number] = Hosted(epoch)
        hosted.since = generation
        hosted.state.take_over(version, clocks, self.fences.items())
        hosted.ledger, hosted.digest = dict(ledger), digest
        self.reply(session, "restored", (key, number))
