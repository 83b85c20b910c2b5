"""A worker's twin: it stages a step on all servers, then has it count on all, and makes again what is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncline.core.members import Member
from syncline.core.rounds import RoundMembership
from syncline.core.slice_state import Copy, life_of
from syncline.core.wire.control import Passed
from syncline.core.wire.leases import LeaseAck

from .member import SimMember
from .world import Frame, Session

if TYPE_CHECKING:
    from .job import Job


class Open:
    """A step that is not acknowledged: how far it is, server by server."""

    __slots__ = ("acks", "back_at", "is_late", "phase", "requests", "round_membership", "states")

    def __init__(self, phase: int, back_at: int | None, acks: tuple[LeaseAck, ...]) -> None:
        self.phase, self.back_at, self.acks, self.is_late = phase, back_at, acks, False
        self.states: dict[str, str] = {}  # life: staging, staged, committing, done
        self.requests: dict[str, int] = {}
        self.round_membership: RoundMembership | None = None  # with spare workers: the word of the server of slice 0


class Worker(SimMember):
    """Goes through its script: steps, rests, barriers, then it leaves."""

    role = "worker"

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job, name)
        self.script = job.scenario.scripts[name]
        self.place = job.done.get(name, 0)
        self.clock, self.phase, self.acked = 0, 0, 0
        self.open: dict[int, Open] = {}
        self.begun_at: dict[int, int] = {}
        self.replica_sets: dict[int, str] = {}  # slice: life of its primary
        self.has_entered, self.num_entries = False, 0
        self.is_computing = False
        self.num_requests = 0
        self.asked: dict[str, int] = {}  # a rest, or a place: life and request
        self.given: dict[str, Any] = {}
        self.back_at: int | None = None
        self.needs_place = self.has_departed = False
        self.ignored: set[str] = set()  # servers that are gone, by the coordinator's word
        self.frozen_at = 0.0
        self.blocked: set[str] = set()  # servers to which the connection was lost just now
        self.copies: dict[int, tuple[int, dict[Any, int], dict[Any, int]]] = {}
        self.known: dict[int, int] = {}
        self.answered: dict[int, int] = {}  # the last of its clocks that each slice's server has answered
        self.giving: dict[Any, dict[str, Any]] = {}

    def joined(self, late: bool) -> None:
        self.has_entered, self.num_entries = not late, int(not late)
        self.pump()

    def what(self) -> str:
        """What else it is about, for whoever looks for the reason of a wait."""
        return ""

    def servers(self) -> list[str]:
        return sorted(set(self.replica_sets.values()))

    # -- the script ---------------------------------------------------------------------------------------

    def loop(self) -> int:
        """Of which it is in the rounds; -1: none."""
        return -1

    def pump(self) -> None:
        if not self.generation or not self.incarnation:
            return
        if not self.has_entered and self.must_enter():
            if "enter" not in self.asks:
                self.asks["enter"] = (self.num_entries, self.loop())
                self.ask()
            return
        self._go_on()
        for clock in sorted(self.open):
            self._advance(clock, self.open[clock])

    def must_enter(self) -> bool:
        """Whether it is to take part from now on."""
        return self.script[self.place : self.place + 1] == ("step",)

    def _leave(self) -> None:
        if self.open or "leave" in self.asks:
            return
        self.job.ledger.fenced.add((self.name, self.incarnation))
        if self.job.scenario.saves and not self.has_departed:  # first no round waits for it any more
            self._ask_all("depart", ())
        else:
            self.asks["leave"] = ()
            self.ask()

    def _go_on(self) -> None:
        if self.is_computing:
            return
        if self.place >= len(self.script):
            self._leave()
            return
        what = self.script[self.place]
        if what == "step":
            if len(self.open) <= self.job.scenario.window:
                if self.needs_place and self.job.policy.kind == "bounded":
                    self._ask_all("place", ())
                else:
                    self._begin_step()
        elif not self.open and "barrier" not in self.asks:
            self._ask_all("rest", (self.phase, what == "barrier"))

    def _begin_step(self) -> None:
        self.begun_at[self.clock + 1] = self.place
        self.place += 1
        self._open_step((), (), self.place)

    def _open_step(self, acks: tuple[LeaseAck, ...], samples: tuple[tuple[int, int], ...], place: int) -> None:
        """`samples`: epochs and positions that it has read."""
        self.clock += 1
        self.open[self.clock] = Open(self.phase, self.back_at, acks)
        self.back_at, self.needs_place = None, False
        self.job.ledger.step_sent((self.name, self.incarnation, self.clock), samples)
        self.is_computing = True
        self.after(0.004 + 0.03 * self.world.draw("compute", self.name, place), self._computed)

    def _computed(self) -> None:
        self.is_computing = False
        self.pump()

    def _ask_all(self, kind: str, body: tuple[Any, ...]) -> None:
        is_counted = self.has_entered or self.num_entries
        if not (is_counted and set(self.servers()) - set(self.given)):
            self._all_given(kind)
            return
        for life in self.servers():
            if life not in self.asked and life not in self.given and life not in self.blocked:
                self.asked[life] = self._request()
                self.send(life, self.frame(kind, (self.asked[life], *body)))

    def _all_given(self, kind: str) -> None:
        given, self.given, self.asked = self.given, {}, {}
        if kind == "place":
            self.back_at, self.needs_place = max(given.values()), False
        elif kind == "depart":
            self.has_departed = True
        elif self.script[self.place] == "barrier":
            turn = self.script[: self.place + 1].count("barrier")
            self.asks["barrier"] = (turn, self.phase)
            self.ask()
            return
        else:
            self.phase += 1
            self.needs_place = True
            self._done_with(self.place)
            self.place += 1
        self.pump()

    def _done_with(self, place: int) -> None:
        self.job.done[self.name] = max(self.job.done.get(self.name, 0), place + 1)

    def on_passed(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame) and self.asks.get("barrier", (0,))[0] == frame.body[0]:
            del self.asks["barrier"]
            passed = frame.body[1]
            if "no_second_entry" in self.job.bugs:
                passed = Passed(passed.phase)
            self.phase, self.needs_place = passed.phase, passed.is_away
            self.has_entered = self.has_entered and not (passed.is_away and self.job.policy.in_rounds)
            self._done_with(self.place)
            self.place += 1
            self.pump()

    def on_entered(self, session: Session, frame: Frame) -> None:
        this = (self.incarnation, self.num_entries)
        if self.heed(session, frame) and not self.has_entered and frame.body[:2] == this:
            self.has_entered, self.num_entries = True, self.num_entries + 1
            self.asks.pop("enter", None)
            self.phase, self.back_at = max(self.phase, frame.body[2]), frame.body[3]
            self.pump()

    def on_left(self, session: Session, frame: Frame) -> None:
        if "leave" in self.asks and frame.body == (self.incarnation,):
            self.job.finished.add(self.name)
            self.world.crash(self, restart=False)
            self.job.has_finished()

    # -- steps --------------------------------------------------------------------------------------------

    def _request(self) -> int:
        self.num_requests += 1
        return self.num_requests

    def _advance(self, clock: int, step: Open) -> None:
        servers = self.servers()
        alone = len(servers) == 1
        for life in servers:
            if life not in step.states and life not in self.blocked:
                step.states[life] = "committing" if alone else "staging"
                request = step.requests[life] = self._request()
                slices = frozenset(n for n, primary in self.replica_sets.items() if primary == life)
                body = (request, clock, step.phase, slices, step.back_at, alone, step.acks)
                self.send(life, self.frame("stage", body))
        unready = alone or any(step.states.get(life, "staging") == "staging" for life in servers)
        if unready and "commit_early" not in self.job.bugs:
            return
        before = self.open.get(clock - 1)
        if before is not None and any(before.states.get(life) in (None, "staging", "staged") for life in servers):
            return
        decider = self.replica_sets.get(0) if self.job.policy.spare else None
        if decider is not None and step.states.get(decider) != "done":
            servers = [decider]
        for life in servers:
            if step.states.get(life) == "staged":
                step.states[life] = "committing"
                request = step.requests[life] = self._request()
                self.send(life, self.frame("commit", (request, clock, step.round_membership)))

    def _step_of(self, session: Session, frame: Frame) -> tuple[int, Open] | None:
        life = session.other(self).life
        if life in self.ignored:
            return None
        for clock, step in self.open.items():
            if step.requests.get(life) == frame.body[0]:
                return clock, step
        return None

    def on_staged(self, session: Session, frame: Frame) -> None:
        found = self._step_of(session, frame)
        if found is not None:
            found[1].states[session.other(self).life] = "staged"
            self.pump()

    def on_restage(self, session: Session, frame: Frame) -> None:
        found = self._step_of(session, frame)
        if found is not None:
            found[1].states.pop(session.other(self).life, None)
            self.pump()

    def on_committed(self, session: Session, frame: Frame) -> None:
        found = self._step_of(session, frame)
        if found is None:
            return
        clock, step = found
        step.states[session.other(self).life] = "done"
        step.round_membership = frame.body[4] or step.round_membership
        step.is_late = step.is_late or frame.body[3]
        lands = self.job.policy.in_rounds or clock % self.job.scenario.pull_every == 0
        for number, epoch, version, clocks, ledger in frame.body[2]:
            self.job.ledger.seen(self.life, number, epoch, version)
            self.known[number] = max(version, self.known.get(number, 0))
            self.answered[number] = max(clock, self.answered.get(number, 0))
            if lands:
                self.copies[number] = (version, clocks, ledger)
        while self.acked + 1 in self.open:
            step = self.open[self.acked + 1]
            if any(step.states.get(life) != "done" for life in self.servers()):
                break
            del self.open[self.acked + 1]
            self.acked += 1
            self.step_answered(step)
            self.acknowledge(self.acked)
        self.pump()

    def step_answered(self, step: Open) -> None:
        """By all servers."""

    def acknowledge(self, clock: int) -> None:
        holders = {}
        for number, life in self.replica_sets.items():
            server: Any = self.world.processes[life]
            holders[number] = server.hosted.get(number)
        # An answer that came before its server was given up counts as of then.
        frozen = any(life in self.ignored for life in self.replica_sets.values())
        when = self.frozen_at if frozen else self.world.now
        self.job.ledger.acknowledge((self.name, self.incarnation, clock), holders, when)
        self._done_with(self.begun_at.pop(clock, 0))

    def on_refresh(self, session: Session, frame: Frame) -> None:
        life = session.other(self).life
        if self._step_of(session, frame) is not None or self.asked.get(life) == frame.body[0]:
            self.ask()

    def on_behind(self, session: Session, frame: Frame) -> None:
        life = session.other(self).life
        if self._step_of(session, frame) is not None or self.asked.get(life) == frame.body[0]:
            self.after(0.1, lambda: self._restart(life))

    def on_fenced(self, session: Session, frame: Frame) -> None:
        life = session.other(self).life
        if self._step_of(session, frame) is not None or self.asked.get(life) == frame.body[0]:
            self.end()

    def on_rested(self, session: Session, frame: Frame) -> None:
        self._given(session, frame, True)

    def on_placed(self, session: Session, frame: Frame) -> None:
        self._given(session, frame, frame.body[-1])

    def _given(self, session: Session, frame: Frame, value: Any) -> None:
        life = session.other(self).life
        if self.asked.get(life) == frame.body[0]:
            self.given[life] = value
            self.pump()

    # -- what goes wrong ----------------------------------------------------------------------------------

    def _restart(self, life: str) -> None:
        self._forget(life)
        self.blocked.discard(life)
        self.pump()

    def _forget(self, life: str) -> None:
        """What was said to this server and not answered is said again, in order."""
        self.blocked.add(life)
        for step in self.open.values():
            if step.states.get(life) != "done":
                step.states.pop(life, None)
                step.requests.pop(life, None)
        if life not in self.given:
            self.asked.pop(life, None)

    def lost(self, session: Session) -> None:
        super().lost(session)
        life = session.other(self).life
        if session.ends[0] is self:
            self._forget(life)
            self.after(0.02, lambda: self._restart(life))
            for key, giving in self.giving.items():
                if giving["life"] == life:
                    self.after(0.02, lambda key=key: self._give(key))

    def take_roster(self, generation: int, members: list[Member], replica_sets: dict[int, str]) -> None:
        if generation <= self.generation:
            return
        lives = {m.name: m.address.unix for m in members if m.address is not None}
        self.generation = generation
        self.replica_sets = {number: lives[name] for number, name in replica_sets.items()}
        self.ignored.clear()
        if "redo_new_clock" in self.job.bugs and self.open:
            self.open = {self.clock + k: step for k, step in enumerate(self.open.values(), 1)}
            for clock in self.open:
                self.job.ledger.step_sent((self.name, self.incarnation, clock))
                self.begun_at[clock] = self.place - 1
            self.clock += len(self.open)
        for step in self.open.values():
            step.states.clear()
            step.requests.clear()
            step.round_membership = None
        self.asked, self.given = {}, {}
        self.asks.pop("barrier", None)  # who is away says so again
        self.pump()

    # -- copies -------------------------------------------------------------------------------------------

    def on_ask_copies(self, session: Session, frame: Frame) -> None:
        if not self.heed(session, frame):
            return
        key, slices = frame.body
        self.ignored.update(
            self.replica_sets[n] for n in slices if n in self.replica_sets
        )  # nothing more is taken from them
        self.frozen_at = self.world.now
        copies, mine = [], life_of(self.name, self.incarnation)
        for number in slices:
            version, clocks, _ = self.copies.get(number, (0, {}, {}))
            lives = {life_of(*who): clock for who, clock in clocks.items()}
            lives[mine] = max(lives.get(mine, 0), self.answered.get(number, 0))
            copies.append(Copy(number, version, lives, self.known.get(number, 0)))
        self.reply(session, "given_copies", (key, copies))

    def on_give_copies(self, session: Session, frame: Frame) -> None:
        if not self.heed(session, frame):
            return
        key, wanted, target = frame.body
        self.giving[key] = {"session": session, "left": dict(wanted), "life": target.address.unix}
        self._give(key)

    def _give(self, key: Any) -> None:
        giving = self.giving.get(key)
        if giving is None:
            return
        for number, (version, clocks, epoch, generation) in giving["left"].items():
            ledger = self.copies.get(number, (0, {}, {}))[2]
            body = (key, number, version, clocks, ledger, epoch, self.job.digest(ledger), generation)
            self.send(giving["life"], self.frame("restore", body))

    def on_restored(self, session: Session, frame: Frame) -> None:
        key, number = frame.body
        giving = self.giving.get(key)
        if giving is not None:
            giving["left"].pop(number, None)
            if not giving["left"]:
                del self.giving[key]
                self.reply(giving["session"], "gave", (key, self.name))
