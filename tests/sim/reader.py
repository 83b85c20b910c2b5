"""A worker's twin that loops over a loader: epoch after epoch, from the first one whenever it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncline.core.members import Member
from syncline.core.rounds import LOOP
from syncline.core.wire.leases import AskLease, GivenLease, LeaveEpoch
from syncline.worker.data.leases import BatchRange, LeaseAcks, Portion

from .leasing import LOADER
from .worker import Open, Worker
from .world import Frame, Session

if TYPE_CHECKING:
    from .job import Job

AGAIN_SECONDS = 0.25


class Reader(Worker):
    """Opens an epoch, reads what it is given, makes a step with every batch, rests when the epoch is over."""

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job, name)
        assert job.scenario.data is not None
        self.data = job.scenario.data
        self.place, self.activity = 0, "open"
        self.acks, self.portion, self.piece = LeaseAcks(), Portion(self.data.batch), None
        self.piece: BatchRange | None
        self.is_finished, self.has_paused, self.enters_again = False, False, False
        self.must_tell = False
        self.level = 0  # of its wait: 0 none, 1 asked once more, 2 asked to be told when there is more
        self.not_before = 0.0
        self.told = (0, 0.0)
        self.rests_from = 0
        self.num_asked = self.num_steps = 0  # so far, and in this loop
        self.said: dict[str, tuple[Any, Session | None]] = {}

    def what(self) -> str:
        return f" {self.activity} level {self.level} left {self.portion.num_left} piece {self.piece}"

    def is_said(self, life: str, kind: str, body: Any) -> bool:
        """Questions about leases are said once in each connection."""
        if kind not in ("open_epoch", "ask_lease", "leave_epoch"):
            return False
        session = self.world.sessions.get((self.life, life))
        if session is not None and self not in session.heard and self.said.get(kind) == (body, session):
            return True
        self.said[kind] = (body, self.send(life, self.frame(kind, body)))
        return True

    # -- the loop -----------------------------------------------------------------------------------------

    def take_roster(self, generation: int, members: list[Member], replica_sets: dict[int, str]) -> None:
        lives = {m.name: m.address.unix for m in members if m.address is not None}
        if generation > self.generation and self.replica_sets != {n: lives[name] for n, name in replica_sets.items()}:
            self.must_tell = self.has_paused  # servers that have come since do not know that it rests
        super().take_roster(generation, members, replica_sets)

    def loop(self) -> int:
        return self.phase // LOOP * LOOP

    def must_enter(self) -> bool:
        return self.piece is not None

    def on_entered(self, session: Session, frame: Frame) -> None:
        if not self.has_entered and max(self.phase, frame.body[2]) % LOOP == LOOP - 1:
            self.job.ledger.fail(f"{self.life} is to enter at the end of its loop, from where it cannot pause")
        super().on_entered(session, frame)

    def _done_with(self, place: int) -> None: ...

    def _go_on(self) -> None:
        if self.is_computing:
            return
        if self.place >= len(self.script):
            self._leave()
        elif self.must_tell and self.has_paused and self.has_entered:
            self._ask_all("rest", (self.rests_from, False))
        else:
            getattr(self, "_" + self.activity)()

    def _ask_for(self, kind: str, body: Any) -> None:
        if kind not in self.asks:
            self.asks[kind] = body
            self.ask()

    def _open(self) -> None:
        self._ask_for("open_epoch", (self.place, self.data))

    def on_opened(self, session: Session, frame: Frame) -> None:
        number, is_left = frame.body
        if self.heed(session, frame) and "open_epoch" in self.asks and number == self.place:
            del self.asks["open_epoch"]
            self.portion, self.is_finished, self.level = Portion(self.data.batch), not is_left, 0
            self.activity, self.num_steps = "read", 0
            self.pump()

    def _leaves_early(self) -> bool:
        """As by `break`: what it has not begun is others'. The first worker never does: an epoch must have an end."""
        draw = self.world.draw("leaves early", self.name, self.place)
        return draw < 0.15 and self.name != "worker-0" and self.num_steps >= draw * 30

    def _forget_question(self) -> None:
        """What it has asked is on its way, or the answer is; its connection may break right then."""
        if self.asks.pop("ask_lease", None) is None or self.world.draw("breaks", self.name, self.place) > 0.5:
            return
        session = self.world.sessions.get((self.life, self.world.current["coordinator"].life))
        if session is not None:
            self.world.break_session(session, ("leaves", self.life, self.place))

    def _read(self) -> None:
        if self.piece is None and not self.is_finished and self._leaves_early():
            self._forget_question()
            self.activity = "end"
            self._end()
            return
        self._ask_ahead()
        if self.piece is None:
            self.piece = self.portion.cut()
            if self.piece is not None and self.enters_again:
                self.has_entered, self.enters_again = False, False
            if self.piece is not None and not self.has_entered:
                self.phase, self.has_paused, self.must_tell = self.phase // LOOP * LOOP, False, False
                self.pump()
                return
        if self.piece is not None:
            self._step(self.piece)
        elif self.is_finished:
            self.activity = "end"
            self._end()
        elif "ask_lease" not in self.asks:
            self._wait()

    def _step(self, piece: BatchRange) -> None:
        if len(self.open) > self.job.scenario.window:
            return
        if self.needs_place and self.job.policy.kind == "bounded":
            self._ask_all("place", ())
            return
        self.piece, self.has_paused, self.num_steps = None, False, self.num_steps + 1
        self.acks.read(piece)
        positions = piece.span.positions(piece.begin, piece.end)
        samples = tuple((self.place, int(position)) for position in positions)
        self._open_step(tuple(self.acks.take()), samples, self.clock)

    # -- asking -------------------------------------------------------------------------------------------

    def _ask_ahead(self) -> None:
        idle = self.level == 0 and not self.is_finished and "ask_lease" not in self.asks
        if idle and self.world.now >= self.not_before and self.portion.is_low:
            self._question(waits=False)

    def _question(self, *, waits: bool) -> None:
        self.num_asked += 1
        before, self.told = self.told, (self.acks.samples, self.world.now)
        given = [] if "given_once" in self.job.bugs else self.portion.given
        message = AskLease(
            LOADER, self.place, self.acks.held(self.portion.numbers), self.portion.num_left,
            self.told[0] - before[0], self.told[1] - before[1], waits, self.portion.newest, given,
        )  # fmt: skip
        self._ask_for("ask_lease", (self.num_asked, message))

    def _wait(self) -> None:
        """Nothing is left here. When others have all the rest, no round is to wait for this worker meanwhile."""
        if self.level == 0:
            self.level = 1
            self._question(waits=False)
        elif self._has_rested(self.phase):
            self.level = 2
            self._question(waits=True)

    def on_given_lease(self, session: Session, frame: Frame) -> None:
        number, given = frame.body
        if not self.heed(session, frame) or self.asks.get("ask_lease", (0,))[0] != number:
            return
        del self.asks["ask_lease"]
        assert isinstance(given, GivenLease)
        if given.is_finished:
            self.is_finished = True
        elif given.lease:
            self.portion.take(given)
            self.level = 0
        else:
            self.not_before = self.world.now + AGAIN_SECONDS
        self.pump()

    def on_recall(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame):
            is_here = self.activity == "read" and frame.body[0] == self.place
            before = self.portion.given if "given_once" in self.job.bugs else []
            newest = self.portion.newest if is_here else None
            given = self.portion.give_back(keeps_begun=False) if is_here else []
            given = [one for one in given if one not in before]
            self.reply(session, "gave_back", (*frame.body, given, newest))

    def on_ask_uses(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame):
            open_ = [] if self.acks.are_told() else [(self.name, self.incarnation)]
            self.reply(session, "acks", (frame.body[0], self.acks.committed(), self.acks.late(), open_))

    def beat(self) -> Any:
        committed = [use for step in self.open.values() for use in step.acks]
        return (committed, []) if "done_by_word" in self.job.bugs else ()

    def step_answered(self, step: Open) -> None:
        self.acks.answered(step.acks, is_late=step.is_late)

    # -- rests --------------------------------------------------------------------------------------------

    def _has_rested(self, phase: int) -> bool:
        """Whether it is in no more rounds up to this phase; all servers are told, once until its next step."""
        if self.open:
            return False
        if self.has_paused and self.phase % LOOP > 0 and self.activity == "read":
            return True
        self.rests_from = phase
        if not self.has_entered:
            self._are_told()
            return True
        self._ask_all("rest", (phase, False))
        return False

    def _all_given(self, kind: str) -> None:
        if kind != "rest":
            super()._all_given(kind)
            return
        self.given, self.asked = {}, {}
        if self.must_tell:
            self.must_tell = False
        else:
            self._are_told()
        self.pump()

    def _are_told(self) -> None:
        self.phase, self.needs_place, self.has_paused = self.rests_from + 1, True, True
        if self.activity == "rest":
            self.place, self.activity = self.place + 1, "open"
            self.enters_again = False
        else:
            again = self.has_entered and "no_second_entry" not in self.job.bugs
            self.enters_again = again and self.job.policy.stands_still

    def _end(self) -> None:
        """The loop is left."""
        given = list(self.portion.leave([]).items())
        if given or not self.is_finished:
            self._ask_for("leave_epoch", LeaveEpoch(LOADER, self.place, given, [], self.portion.newest))
            return
        self._is_left()

    def on_left_epoch(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame) and "leave_epoch" in self.asks:
            del self.asks["leave_epoch"]
            self._is_left()

    def _is_left(self) -> None:
        if self.is_finished:
            self.acks.forget(self.portion.numbers)
        self.activity = "rest"
        self.pump()

    def _rest(self) -> None:
        if self._has_rested(self.phase // LOOP * LOOP + LOOP - 1):
            self.pump()
