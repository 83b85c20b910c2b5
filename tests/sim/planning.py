"""What a coordinator's twin does about seats: seeds by the core's plan, and copies for slices that nobody has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncline.core.liveness import Liveness
from syncline.core.membership import JobState, Membership
from syncline.core.seats import Plan, by_source, plan, rehome

from .world import Frame, Process, Session

if TYPE_CHECKING:
    from .job import Job


class Planning(Process):
    """Works in the background, and gives way to every change."""

    job: Job
    state: JobState
    membership: Membership
    liveness: Liveness
    retiring: set[str]
    links: dict[str, Session]
    seeding: dict[str, Any] | None
    restoring: dict[str, Any] | None
    attempt: dict[str, Any] | None
    is_dirty: bool
    moves: bool
    server_is_out: bool
    departed: bool

    def pump(self) -> None: ...

    def keep(self) -> bool: ...  # type: ignore[empty-body]

    def say(self, name: str, kind: str, body: Any, generation: int | None = None) -> None: ...

    def _is_member(self, frame: Frame) -> bool: ...  # type: ignore[empty-body]

    def _wait(self, seconds: float) -> None: ...

    def _begin(self, wanted: Plan | None) -> None: ...

    def _key(self) -> tuple[int, int]: ...  # type: ignore[empty-body]

    # -- plans --------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        state = self.state
        hosts = dict.fromkeys(self.membership.servers(), "host")
        sizes = dict.fromkeys(state.seats, 1)
        leaving = self.retiring & set(hosts)
        wanted = plan(state.seats.values(), sizes, hosts, replicas=self.job.scenario.replicas, leaving=leaving)
        if wanted.is_empty:
            self._let_go()
        elif not wanted.seeds:
            self._begin(wanted)
        else:
            jobs: dict[str, list[tuple[str, list[int]]]] = {}
            for (source, target), slices in by_source(wanted.seeds).items():
                jobs.setdefault(source, []).append((target, slices))
            seeding = self.seeding = {"plan": wanted, "generation": state.generation, "jobs": jobs, "keys": {}}
            for source in list(jobs):
                self._seed_next(seeding, source)
            self.after(1.0, lambda: self._drop_seeds(seeding))

    def _seed_next(self, seeding: dict[str, Any], source: str) -> None:
        target, slices = seeding["jobs"][source].pop(0)
        key = self._key()
        seeding["keys"][key] = source
        self.say(source, "seed_to", (key, slices, self.state.members[target]))

    def _drop_seeds(self, seeding: dict[str, Any]) -> None:
        """Whoever follows is let go of with the next generation."""
        if self.seeding is seeding:
            self.seeding, self.is_dirty = None, True
            self._wait(0.1)

    def on_seeded(self, session: Session, frame: Frame) -> None:
        seeding, key = self.seeding, frame.body[0]
        if seeding is None or key not in seeding["keys"]:
            return
        source = seeding["keys"].pop(key)
        if seeding["jobs"][source]:
            self._seed_next(seeding, source)
        elif not seeding["keys"]:
            if self.state.generation == seeding["generation"] and not self.is_dirty and self.attempt is None:
                self.seeding = None
                self._begin(seeding["plan"])
            else:
                self._drop_seeds(seeding)

    def on_seed_failed(self, session: Session, frame: Frame) -> None:
        if self.seeding is not None and frame.body[0] in self.seeding["keys"]:
            self._drop_seeds(self.seeding)

    def on_retire(self, session: Session, frame: Frame) -> None:
        if self._is_member(frame) and len(self.membership.servers()) > 1 + len(self.retiring - {frame.name}):
            self.retiring.add(frame.name)

    def _let_go(self) -> None:
        seated = {name for seat in self.state.seats.values() for name in (seat.primary, seat.backup)}
        for name in sorted(self.retiring - seated):
            self.retiring.discard(name)
            self.membership.leave(name)
            self.liveness.forget(name)
            self.say(name, "retired", ())
            self.is_dirty = True

    # -- copies -------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Slices that no server has come back from the freshest worker's copy."""
        if self.restoring is not None:
            return
        workers = set(self.membership.workers())
        workers |= {n for n, (_, why) in self.state.fencing.items() if why == "left" and n in self.links}
        if not workers:
            return
        key = self._key()
        restoring = self.restoring = {"key": key, "workers": workers, "answers": {}}
        for name in sorted(workers):
            self.say(name, "ask_copies", (key, list(self.state.lost)))
        self.after(1.2, lambda: self._restore_again(restoring))

    def _restore_again(self, restoring: dict[str, Any]) -> None:
        if self.restoring is restoring:
            self.restoring = None
            self.pump()

    def on_given_copies(self, session: Session, frame: Frame) -> None:
        restoring = self.restoring
        if restoring is None or frame.body[0] != restoring["key"]:
            return
        restoring["answers"][frame.name, frame.incarnation] = frame.body[1]
        if {name for name, _ in restoring["answers"]} < restoring["workers"] or "gives" in restoring:
            return
        self._choose(restoring)

    def _choose(self, restoring: dict[str, Any]) -> None:
        answers = restoring["answers"]
        servers = [s for s in self.membership.servers() if s not in self.retiring] or self.membership.servers()
        sizes = dict.fromkeys(self.state.seats, 1)
        seats = {s.slice: s for s in rehome(self.state.seats.values(), sizes, servers)}
        gives: dict[tuple[str, str], dict[int, Any]] = {}
        epoch, revoked = self.job.next_epoch(), 0
        for number in self.state.lost:
            name, incarnation = max(answers, key=lambda who: (answers[who][number][0], who))
            version, clocks, _, _ = answers[name, incarnation][number]
            known = max(given[number][2] for given in answers.values())
            revoked = max(revoked, known - version)
            clocks = dict(clocks)
            for who, given in answers.items():  # what it was told is there it will not make anew
                clocks[who] = max(clocks.get(who, 0), given[number][3])
            if "copy_without_clocks" in self.job.bugs:
                clocks = {}
            if "copy_by_name" in self.job.bugs:
                named = {n: c for (n, _), c in sorted(clocks.items(), key=lambda item: item[1])}
                clocks = {(n, self.state.entered[n]): c for n, c in named.items() if n in self.state.entered}
            at = version if "old_version" in self.job.bugs else known + 1
            entries = [(*who, clock) for who, clock in clocks.items()]
            gives.setdefault((name, seats[number].primary), {})[number] = (
                at, entries, epoch, self.state.generation,
            )  # fmt: skip
        restoring.update(gives=gives, epoch=epoch, revoked=revoked, seats=seats, left=set(), keys={})
        for (name, server), wanted in gives.items():
            key = self._key()
            restoring["keys"][key] = name
            self.say(name, "give_copies", (key, wanted, self.state.members[server]))

    def on_gave(self, session: Session, frame: Frame) -> None:
        restoring = self.restoring
        if restoring is None or frame.body[0] not in restoring.get("keys", {}):
            return
        del restoring["keys"][frame.body[0]]
        if restoring["keys"]:
            return
        state, self.restoring = self.state, None
        lost, state.lost, before = state.lost, [], state.seats
        state.seats = {**before, **restoring["seats"]}
        state.num_revoked += restoring["revoked"]
        self.moves = self.server_is_out = True
        # Said before it is kept: a crash in between says it twice, the other order would say nothing.
        self.job.ledger.report_restored(lost, restoring["epoch"], restoring["revoked"], self.departed)
        if not self.keep():
            state.lost, state.seats = lost, before
            self._wait(0.05)
            return
        self.pump()
