"""What a job remembers of its script: where it stands, what is saved of it, and what is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from syncline.core.wire.checkpoints import Finish, Save, Saved
from syncline.errors import ConfigError, ConnectionLost, FencedError
from syncline.net.link import Link
from syncline.worker.boundary import END, Position
from syncline.worker.hearing import FromCoordinator
from syncline.worker.notes import Notes
from syncline.worker.saves import Saves
from syncline.worker.script import ScriptState
from syncline.worker.taking_up import TakenUp

if TYPE_CHECKING:
    from syncline.worker.job import Job

#: The last save is waited for as long as others work: no deadline of ours.
_FINISH_SECONDS = 1e9


class _Leaves(Exception):  # no error
    """This worker was asked to leave meanwhile."""


class Memory:
    """The parts of it, put together for one job."""

    def __init__(
        self, job: Job, link: Link, hearing: FromCoordinator, say: Callable[[str], None], *, is_late: bool
    ) -> None:
        """`is_late`: this worker joined a running job: what others, or an earlier life of it, noted is put back."""
        self._job, self._link, self._hearing, self._say = job, link, hearing, say
        self._has_told = False  # that a save is made later
        self._pending: list[Callable[[], bool]] = []
        self._num_saves = 0  # outside of loops
        exchange, boundary = job.exchange, job.samples.boundary
        self.boundary = boundary
        boundary.clock = lambda: exchange.clock
        boundary.is_in_loop = lambda: exchange.uses.num_loops > 0
        boundary.is_clean = lambda: not (exchange.uses.is_any_held or any(some() for some in self._pending))
        has_saves = bool(job.config.checkpoint or job.config.resume)
        may_be = has_saves or is_late
        self.taken_up = TakenUp(job.name, boundary, job.ask, may_be=may_be, is_late=is_late)
        self.state = ScriptState(self.taken_up.saved, lambda: self.taken_up.is_over, lambda: job.known_device)
        self.state.random_restored = job.own_stream.restored
        self.taken_up.begin(self.state)
        saves = hearing.saves = Saves(job.name, boundary, self.state, lambda: exchange.num_landed, self._facts, say)
        boundary.on_stop = saves.note_stop if has_saves else None
        self.notes = Notes(job, link, self.state, self._facts, say)

    def _facts(self) -> dict[str, Any]:
        before = self.taken_up.own_step
        return {"own_step": before + self._job.own_step, "before": before}

    def hold_back(self, is_pending: Callable[[], bool]) -> None:
        """While this is so, something is under way that no commit has: the script is at no boundary."""
        self._pending.append(is_pending)

    def save(self) -> str:
        job, message = self._job, Save(f"{self._job.name} called job.save()")
        if not job.config.checkpoint:
            raise ConfigError("job.save(): this job has no place for checkpoints; start it with --checkpoint DIR")
        if not self.boundary.is_clean():
            self._link.try_call(message)
            return ""
        place: Position | None = None
        if not self.boundary.is_in_loop():
            self._num_saves += 1
            place = ("save", "", self._num_saves)
            self.boundary.comes_to_place()
        job.settle()
        with self.boundary.waiting(place):
            if name := self.taken_up.name:
                return name  # it stands where it was saved, or is on its way there
            answer = job.ask(message)
        assert isinstance(answer, Saved)
        if not answer.name and not self._has_told:
            self._has_told = True
            self._say(
                "job.save() was called by some workers only, and others wait in their step for this one: the save is "
                "made with the next step, and nobody waits for it; call it in all workers at the same step"
            )
        return answer.name

    def finish(self) -> None:
        """The script has come to its end: returns when the last save is made, or this worker is to go without it."""
        try:
            # Others may have longer to do, an evaluation for one: that is nothing to tell of.
            waits = self._job.exchange.waits.of("the last save", loud_seconds=60.0)
            with waits, self.boundary.waiting(END):
                self._link.call(Finish(), _FINISH_SECONDS, self._while_finishing)
        except (_Leaves, FencedError):
            return
        except ConnectionLost as error:
            raise self._job.explain(error) from None

    def _while_finishing(self) -> None:
        hearing = self._hearing
        hearing.check()
        if hearing.is_retiring:
            hearing.is_retiring, hearing.has_retired = False, True
            raise _Leaves
