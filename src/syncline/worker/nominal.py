"""The nominal weight of a job: a push of this weight counts in full, in `bounded` and `async`."""

from __future__ import annotations

import time
from typing import Protocol

from syncline.config import JobConfig
from syncline.core.policy import policy_of
from syncline.core.wire.control import AskNominal, GivenNominal
from syncline.core.wire.message import Message
from syncline.errors import ProtocolError

#: For the chief to make its first step; then another worker's weight counts.
CHIEF_SECONDS = 5.0
_ASK_SECONDS = 0.02


class Asks(Protocol):
    """What is needed of a job."""

    config: JobConfig

    def ask(self, message: Message) -> Message: ...


class NominalWeight:
    """Asked for once, at the first step: the weight of the chief's first step, at least its loader's batch size."""

    def __init__(self, job: Asks) -> None:
        policy = policy_of(job.config)
        self._job, self._is_needed = job, not policy.in_rounds and policy.weighs
        self._known = 0.0

    def of(self, weight: float, batch_size: int = 0) -> float:
        """The job's nominal weight; `weight`: of this step. It may be a short batch, the last of an epoch; or several
        batches whose gradients were accumulated.
        """
        if not self._is_needed or weight <= 0:
            return self._known or 1.0
        until = time.monotonic() + CHIEF_SECONDS
        while not self._known:
            answer = self._job.ask(AskNominal(max(weight, float(batch_size)), insists=time.monotonic() >= until))
            if not isinstance(answer, GivenNominal):
                raise ProtocolError(f"a question for the nominal weight was answered with {type(answer).__name__}")
            self._known = answer.weight
            if not self._known:
                time.sleep(_ASK_SECONDS)
        return self._known
