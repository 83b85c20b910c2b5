"""What a coordinator's twin does about replica sets: seeds by the core's plan, and copies for slices that nobody
has."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from syncline.core.liveness import Liveness
from syncline.core.membership import JobState, Membership
from syncline.core.reconfigure import Planner
from syncline.core.replica_sets import PlacementPlan, by_source
from syncline.core.slice_state import Copy, Identity, freshest, life_of, num_revoked
from syncline.errors import ConfigError

from .world import Frame, Process, Session

if TYPE_CHECKING:
    from .job import Job


class Planning(Process):
    """Works in the background, and gives way to every change."""

    job: Job
    state: JobState
    membership: Membership
    liveness: Liveness
    deciding: Planner
    links: dict[str, Session]
    seeding: dict[str, Any] | None
    restoring: dict[str, Any] | None
    attempt: dict[str, Any] | None
    is_dirty: bool
    departed: bool
    seated: set[str]  # in a ring: who has every slice, by the last change that was finished

    def pump(self) -> None: ...

    def keep(self) -> bool: ...  # type: ignore[empty-body]

    def say(self, name: str, kind: str, body: Any, generation: int | None = None) -> None: ...

    def _is_member(self, frame: Frame) -> bool: ...  # type: ignore[empty-body]

    def _wait(self, seconds: float) -> None: ...

    def _begin(self, wanted: PlacementPlan | None) -> None: ...

    def _prepare(self, attempt: dict[str, Any]) -> None: ...

    def _key(self) -> tuple[int, int]: ...  # type: ignore[empty-body]

    def acks_are_lost(self) -> None: ...

    def unconfirmed(self) -> set[tuple[int, int]]: ...  # type: ignore[empty-body]

    # -- plans --------------------------------------------------------------------------------------------

    def sizes(self) -> dict[int, int]:
        return dict.fromkeys(self.state.replica_sets, 1)

    def _plan(self) -> None:
        wanted = self.deciding.plan(self.sizes(), self.state.replica_sets)
        if wanted.is_empty:
            self._let_go()
        elif not wanted.seeds or self.job.scenario.is_ring:
            self._begin(wanted)
        else:
            jobs: dict[str, list[tuple[str, list[int]]]] = {}
            for (source, target), slices in by_source(wanted.seeds).items():
                jobs.setdefault(source, []).append((target, slices))
            seeding = self.seeding = {"plan": wanted, "generation": self.state.generation, "jobs": jobs, "keys": {}}
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
        if self._is_member(frame):
            with contextlib.suppress(ConfigError):
                self.deciding.retire(frame.name)

    def _let_go(self) -> None:
        for name in self.deciding.relieved():
            self.deciding.has_left(name)
            self.membership.leave(name)
            self.liveness.forget(name)
            self.say(name, "retired", ())
            self.is_dirty = True

    # -- in a ring ----------------------------------------------------------------------------------------

    def _nobody_has(self, lost: list[int]) -> None:
        """The job is over; unless somebody had it who was known to have it, and not about to let go of it."""
        for member in [m for m in self.state.members.values() if m.name in self.seated and m.address is not None]:
            server: Any = self.world.processes[member.address.unix]
            if "retire" not in server.asks and server.is_alive and set(lost) <= set(server.hosted):
                self.job.ledger.fail(f"slices {lost} are given up, and {server.life} has them")
        self.job.lost_all()

    # -- copies -------------------------------------------------------------------------------------------

    def _restore(self, attempt: dict[str, Any]) -> None:
        """Slices that no server has come back from the freshest worker's copy; then the change goes on."""
        workers = set(self.membership.workers())
        workers |= {n for n in self.state.fencing if n in self.state.left and n in self.links}
        key = self._key()
        restoring = self.restoring = {"key": key, "workers": workers, "answers": {}, "attempt": attempt}
        for name in sorted(workers):
            self.say(name, "ask_copies", (key, list(self.state.lost)))
        self.after(1.2, lambda: self._restore_again(restoring))

    def _restore_again(self, restoring: dict[str, Any]) -> None:
        if self.restoring is restoring:
            self.restoring = self.attempt = None
            self.pump()

    def on_given_copies(self, session: Session, frame: Frame) -> None:
        restoring = self.restoring
        if restoring is None or frame.body[0] != restoring["key"]:
            return
        restoring["answers"][frame.name, frame.incarnation] = frame.body[1]
        if {name for name, _ in restoring["answers"]} < restoring["workers"] or "keys" in restoring:
            return
        self._choose(restoring)

    def _choose(self, restoring: dict[str, Any]) -> None:
        answers: dict[Identity, list[Copy]] = restoring["answers"]
        gives: dict[tuple[str, str], dict[int, Any]] = {}
        epoch, chosen = self.job.next_epoch(), []
        for number in self.state.lost:
            found = freshest(answers, number)
            assert found is not None
            name, copy = found
            chosen.append(copy)
            clocks = {} if "copy_without_clocks" in self.job.bugs else copy.clocks
            if "copy_by_name" in self.job.bugs:
                clocks = {}
                for life, clock in sorted(copy.clocks.items(), key=lambda item: item[1]):
                    who = life.partition("#")[0]
                    if who in self.state.entered:
                        clocks[life_of(who, self.state.entered[who])] = clock
            entries = [(*identity_of(life), clock) for life, clock in clocks.items()]
            gives.setdefault((name, self.state.replica_sets[number].primary), {})[number] = (
                max(copy.version, copy.known), entries, epoch, self.state.generation,
            )  # fmt: skip
        restoring.update(epoch=epoch, revoked=num_revoked(chosen), keys={})
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
        lost, state.lost = state.lost, []
        state.num_revoked += restoring["revoked"]
        # Said before it is kept: a crash in between says it twice, the other order would say nothing.
        acks = self.unconfirmed() if 0 in lost else set()
        slices = {number: hosted for number, hosted in self.job.primaries(state).items() if number in lost}
        self.job.ledger.report_restored(slices, restoring["epoch"], restoring["revoked"], self.departed, acks)
        if 0 in lost:
            self.acks_are_lost()
        if not self.keep():
            state.lost, self.attempt = lost, None
            self._wait(0.05)
            return
        self._prepare(restoring["attempt"])


def identity_of(life: str) -> Identity:
    name, _, incarnation = life.partition("#")
    return name, int(incarnation)
