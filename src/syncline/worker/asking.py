"""A worker asks the coordinator: how long it waits, what may end the wait, and what is said when it was too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from syncline.core.wire.checkpoints import Save
from syncline.core.wire.control import AskLife, AskWhy, Barrier, GivenWhy, Register, Uploaded
from syncline.core.wire.leases import AskLease
from syncline.core.wire.message import Message
from syncline.core.wire.validation import AskReading, AskValidationShard, Attend, Begin, Come, LocalCandidate
from syncline.errors import ConnectionLost, FencedError, SynclineError, WaitTimeout
from syncline.net.link import Link
from syncline.worker.exchange.commit import left
from syncline.worker.hearing import FromCoordinator

if TYPE_CHECKING:
    from syncline.worker.job import Job

#: How long a broken connection waits for the coordinator's word on why.
VERDICT_SECONDS = 4.0
_WAITS: dict[type[Message], str] = {
    Register: "registration",
    AskLease: "the end of the epoch",
    AskLife: "the end of its earlier life",
    Save: "a save",
    **dict.fromkeys((Come, Attend, Begin, AskValidationShard, LocalCandidate, AskReading), "the validation"),
}
#: What may wait for other workers: who is to leave waits no longer.
_FOR_OTHERS = (AskLife, Barrier, Register, Uploaded, AskLease, Attend, Begin, AskReading)
#: Meanwhile no round waits for this worker, or there is none.
_ASIDE = (Barrier, AskLease, Attend, Begin, AskReading)


class Asking:
    """Of one job, in its script's thread."""

    def __init__(self, job: Job, link: Link, hearing: FromCoordinator) -> None:
        self._job, self._link, self._hearing = job, link, hearing

    def ask(self, message: Message, meanwhile: Callable[[], None] = lambda: None) -> Message:
        """The coordinator's answer; `meanwhile` is called now and then, where others are waited for.

        ValidationCalled: it is to be asked again, behind the validation.
        """
        job = self._job
        if job.is_closed:
            raise left(job.name)
        what = _WAITS.get(type(message), type(message).__name__.lower())
        seconds = job.config.wait_seconds
        called_away = job.validating.while_waiting  # others may be in a validation, and wait for this one
        try:
            with job.exchange.waits.of(what):
                if isinstance(message, AskLease) and message.waits:
                    with job.boundary.waiting():
                        return self._link.call(message, seconds, self._while_resting(called_away))
                if isinstance(message, Barrier):
                    return self._link.call(message, seconds, self._while_resting(called_away))
                look = self._while_resting(meanwhile) if isinstance(message, _ASIDE) else self._look
                return self._link.call(message, seconds, look if isinstance(message, _FOR_OTHERS) else None)
        except WaitTimeout:
            why = self._why()
            words = why if "has waited" in why else f"{what} has waited {seconds:g} s: {why}"
            raise WaitTimeout(f"{job.name}: {words}") from None
        except FencedError as error:
            self._hearing.fenced(error)
            raise
        except ConnectionLost as error:
            raise self.explain(error) from None

    def _look(self) -> None:
        """Nobody comes any more to a job that has failed, and who is to leave waits no longer."""
        self._hearing.check()
        self._job.leave_if_retiring()

    def _while_resting(self, meanwhile: Callable[[], None]) -> Callable[[], None]:
        """A server that has come meanwhile, and knows nobody, must not wait for this one."""

        def look() -> None:
            self._look()
            self._job.exchange.follow()
            meanwhile()

        return look

    def _why(self) -> str:
        try:
            answer = self._link.try_call(AskWhy()).wait(5.0)
        except SynclineError as error:
            return str(error)
        return answer.reason if isinstance(answer, GivenWhy) else ""

    def explain(self, error: SynclineError) -> SynclineError:
        """Why a connection broke, by the coordinator's word if it comes soon."""
        self._hearing.heard.wait(VERDICT_SECONDS)
        try:
            self._hearing.check()
        except SynclineError as found:
            return found
        return error
