"""Steps of an optimizer that runs on every worker, on the mean gradient of each round.

All workers of a round get the same mean and make the same step, so their parameters and optimizer state stay equal:
they are replicas. A worker can miss rounds: it joined late, it was restarted, or it had nothing to read at the end of
an epoch. Therefore one worker, the *provider*, pushes its replica with every round, and again before it rests. The
servers then have replica m-1 and the mean of round m, from which replica m follows: for a worker that is behind, for
one that starts again, and in a checkpoint.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from syncline.core.layout import OWN_PREFIX
from syncline.core.rule import Rule
from syncline.worker.exchange.commit import Push
from syncline.worker.exchange.targets import FlatTarget
from syncline.worker.host_memory import HostArray, HostMemory
from syncline.worker.host_optimizer import StepBegin, free_prefix
from syncline.worker.job import Job
from syncline.worker.mean_gradients import check_rounds

#: Workers are told apart by rank modulo this number; two providers would push the same replica.
NUM_SLOTS = 256
#: Rounds without a certain worker until a worker that is behind takes the replica that there is.
MOST_TRIES = 3
#: How long a worker that comes back waits for the provider's replica, and between two looks.
WAIT_SECONDS, AGAIN_SECONDS = 5.0, 0.05
_BEFORE = -1.0  # no round so far


class ReplicatedStep(NamedTuple):
    """A round's mean gradient, for the worker's own replica. `replica`: the worker is behind, and goes on from this
    one. The next step overwrites the arrays.
    """

    mean: dict[str, HostArray]
    replica: dict[str, HostArray] | None


Arrays = Mapping[str, HostArray]
#: (replica, mean gradient) -> the replica after that step; None if it cannot be computed at this moment.
Apply = Callable[[Arrays, Arrays], Arrays | None]


class ReplicatedSteps:
    """`replica`: parameters and optimizer state by name, with the values before the first step. `apply`: makes the
    step outside of `step`, where this worker rests or comes back.
    """

    def __init__(self, job: Job, gradients: Arrays, replica: Arrays, apply: Apply, prefix: str = "") -> None:
        check_rounds(job.config)
        self._job, self._begin, self._apply = job, StepBegin(job), apply
        assign = Rule("Assign")
        prefix = free_prefix(job, {**replica, **gradients, "steps": np.zeros(1)}, prefix)
        reserved = f"{OWN_PREFIX}{prefix}"
        self._replica = HostMemory(job, replica, assign, prefix)
        zeros = {name: np.zeros_like(array) for name, array in gradients.items()}
        self._gradients = HostMemory(job, zeros, assign, f"{reserved}gradients.")
        numbers: dict[str, HostArray] = {
            "round": np.zeros(1, np.int64),  # of the newest mean; one less if no worker was certain
            "replica": np.zeros(1, np.int64),  # the round of the replica on the servers
            "certain": np.full(NUM_SLOTS, _BEFORE, np.float32),  # who was, in the newest round
            "present": np.zeros(NUM_SLOTS, np.float32),  # who was in the newest round
        }
        self._numbers = HostMemory(job, numbers, assign, f"{reserved}steps.")
        small = {memory.segment.index: memory.flat for memory in (self._gradients, self._numbers)}
        self._small = FlatTarget(small)
        self._all = FlatTarget({**small, self._replica.segment.index: self._replica.flat})
        self._is_certain = False  # this worker has the newest replica: it was in the last round, and did not rest
        self._provider, self._num_tries = -1, 0
        self._claimed = self._newest
        self._round = -1 if job.is_late else self._claimed  # others may have gone on while it registered
        self._has_begun = job.is_chief and not job.is_late and not self._claimed  # its values are the registered ones
        # The provider's own replica before its last step: in the memory, or on the servers only.
        self._has_kept = self._has_pushed = False
        alive = weakref.ref(self)
        job.before_rest(lambda: own._provide() if (own := alive()) is not None else None)
        job.before_settle(lambda: own._become_uncertain() if (own := alive()) is not None else None)

    @property
    def _newest(self) -> int:
        """The number of the newest mean."""
        numbers = self._numbers.values
        if numbers["certain"].any():
            return int(numbers["round"][0]) if numbers["certain"][0] != _BEFORE else 0
        return int(numbers["round"][0]) + 1

    def newest(self) -> Arrays | None:
        """The newest replica, at the start and whenever rounds may have been made without this worker; None: it is
        the one that the worker has.
        """
        if self._is_certain:
            return None
        until = time.monotonic() + WAIT_SECONDS
        while True:
            if not self._pull(until - time.monotonic()):
                return None  # the others make rounds all the time: one of them brings it
            newest, known = self._newest, int(self._numbers.values["replica"][0])
            if newest - known <= 1 or time.monotonic() > until:
                break
            time.sleep(AGAIN_SECONDS)  # the provider rests soon, and pushes it then
        if newest == self._claimed and self._has_begun:
            return None
        self._has_begun = True
        if newest - known > 1:
            return None  # one of the next rounds brings it
        self._claimed, self._round = newest, -1 if self._job.is_late else newest
        return self._apply(self._replica.values, self._gradients.values) if newest > known else self._replica.values

    def _pull(self, seconds: float) -> bool:
        """Replica, mean and numbers of one round. Slices read one by one can be of two rounds: a worker that rests
        does not hold up the provider's push.
        """
        self._has_kept = self._has_pushed = False
        slices = [part for part in self._job.exchange.layout.slices() if self._all.wants(part)]
        return self._job.exchange.pull_level(slices, self._all, seconds)

    @property
    def _slot(self) -> int:
        return self._job.rank % NUM_SLOTS

    def step(
        self,
        gradients: Arrays,
        state: Callable[[], Arrays],
        weight: float | None = None,
    ) -> ReplicatedStep:
        """One round. `state` returns this worker's replica before the step; it is called only for a push of it."""
        weight = self._begin.begin(weight, id(self))
        self._gradients.check(gradients, "a gradient")
        self._job.exchange.times.lap("compute")
        is_certain = self._is_certain
        is_finite = self._gradients.fill(gradients)
        one = np.zeros(NUM_SLOTS, np.float32)
        one[self._slot] = 1
        told: dict[str, HostArray] = {"present": one, "certain": one if is_certain else np.zeros_like(one)}
        finite = pushed = self._gradients.ids
        if is_certain:
            told["round"] = np.array([self._round + 1])
        has_pushed = is_certain and self._provider == self._slot
        if has_pushed:
            is_finite = self._fill_replica(state()) and is_finite
            finite = pushed = pushed + self._replica.ids
            told["replica"] = np.array([self._round])
        self._numbers.fill(told)
        push = Push(
            pushed=tuple(sorted(pushed + self._numbers.ids_of(told))),
            weight=weight,
            finite=tuple(sorted(finite)) if is_finite else (),
        )
        self._job.exchange.commit(push, self._small if is_certain else self._all).wait()
        self._job.stepped()
        is_behind = self._take_round()
        self._has_begun = True
        self._has_kept = self._has_pushed = False
        if self._is_certain and self._provider == self._slot and not is_behind:
            self._has_pushed = has_pushed
            if not has_pushed:
                for name, array in state().items():
                    self._replica.values[name][...] = array
                self._has_kept = True
        self._job.leave_if_asked()
        return ReplicatedStep(self._gradients.values, self._replica.values if is_behind else None)

    def _take_round(self) -> bool:
        """Looks at the answer. Returns whether this worker must go on from the servers' replica."""
        numbers, newest = self._numbers.values, self._newest
        certain, present = np.flatnonzero(numbers["certain"]), np.flatnonzero(numbers["present"])
        self._provider = int((certain if certain.size else present)[0]) if present.size else -1
        is_newest = newest == self._round + 1 or (newest == self._claimed + 1 and not certain.size)
        if is_newest and self._has_begun:
            self._round, self._claimed, self._is_certain = newest, newest, True
            return False
        if self._is_certain and not self._pull(WAIT_SECONDS):  # a certain worker does not pull the replica
            self._round, self._is_certain = -1, False
            return True
        num_lost = newest - 1 - int(numbers["replica"][0])
        self._num_tries = 0 if certain.size else self._num_tries + 1
        if num_lost and (certain.size or (present.size > 1 and self._num_tries < MOST_TRIES)):
            self._round, self._is_certain = -1, False  # the provider's comes with one of the next rounds
            return True
        if num_lost:
            self._job.notice(f"the mean gradients of {num_lost} rounds were lost with their workers", is_own=True)
        self._round, self._claimed, self._is_certain = newest, newest, True
        return True

    def _fill_replica(self, state: Arrays) -> bool:
        """Returns whether all of it was found finite."""
        self._replica.check(state, "the value")
        return self._replica.fill(state)

    def _provide(self) -> None:
        """Before a rest: others may go on without this worker, or all may end here."""
        if not (self._is_certain and self._provider == self._slot and (self._has_kept or self._has_pushed)):
            return
        if not self._has_kept:
            if not self._pull(WAIT_SECONDS):
                return
            if self._newest != self._round or int(self._numbers.values["replica"][0]) != self._round - 1:
                return  # the others have gone on
            self._has_kept = True
        after = self._apply(self._replica.values, self._gradients.values)
        if after is None:  # the servers have the replica before the last step, and its mean
            return
        self._has_kept = self._has_pushed = False
        self._fill_replica(after)
        told = {"replica": np.array([self._round])}
        self._numbers.fill(told)
        push = Push(pushed=tuple(sorted(self._replica.ids + self._numbers.ids_of(told))))
        self._job.exchange.commit(push, None).wait()

    def _become_uncertain(self) -> None:
        """At a rest or a barrier: others may go on without this worker."""
        self._is_certain = False
