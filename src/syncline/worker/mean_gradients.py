"""The mean gradient of a round, for optimizers that run on every worker: `jax.push_pull`, TensorFlow's tape."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from syncline.config import JobConfig
from syncline.core.layout import OWN_PREFIX
from syncline.core.policy import policy_of
from syncline.core.rule import Rule
from syncline.errors import ConfigError
from syncline.worker.exchange.commit import Push
from syncline.worker.exchange.targets import FlatTarget
from syncline.worker.host_memory import HostArray, HostMemory
from syncline.worker.host_optimizer import StepBegin, free_prefix
from syncline.worker.job import Job

REMEDY = "use the distributed optimizer of your framework, which works with every policy, or --policy sync"


def check_rounds(config: JobConfig) -> None:
    """Raises ConfigError where there is no mean gradient that all workers get."""
    policy = policy_of(config)
    if not policy.stands_still:
        raise ConfigError(f"a mean gradient needs rounds of all workers, and --policy {policy} has none; {REMEDY}")
    if config.steps_locally:
        raise ConfigError(
            f"a mean gradient is taken in every step, and --sync-every {config.sync_every} asks for local steps; "
            "use the distributed optimizer of your framework, or leave --sync-every out"
        )
    if policy.aggregate is not None or policy.lr_per_worker:
        said = f"--aggregate {config.aggregate}" if policy.aggregate is not None else "--lr-per-worker"
        raise ConfigError(
            f"{said} is for gradients that rules on the servers take; give the distributed optimizer of your "
            "framework a syncline.Rule, or leave it out"
        )


class MeanGradients:
    """The weighted mean of the gradients of a round's workers, under the rule `Assign`."""

    def __init__(self, job: Job, like: Mapping[str, HostArray], prefix: str = "") -> None:
        check_rounds(job.config)
        self._job, self._begin = job, StepBegin(job)
        prefix = free_prefix(job, like, prefix or f"{OWN_PREFIX}gradients.")
        self._memory = HostMemory(job, {n: np.zeros_like(a) for n, a in like.items()}, Rule("Assign"), prefix)
        self._target = FlatTarget({self._memory.segment.index: self._memory.flat})

    def mean(self, gradients: Mapping[str, HostArray], weight: float | None = None) -> dict[str, HostArray]:
        """The mean over the workers of this round. The next call overwrites the arrays. A missing name counts as 0.

        `weight`: by default the samples that a loader of ours has handed out since the last call, else 1.
        """
        job, exchange, memory = self._job, self._job.exchange, self._memory
        weight = self._begin.begin(weight, id(self))
        memory.check(gradients, "a gradient")
        exchange.times.lap("compute")
        is_finite = memory.fill(gradients)
        for zeros in memory.in_arena([name for name in memory.values if name not in gradients]).values():
            zeros[...] = 0
        push = Push(pushed=memory.ids, weight=weight, finite=memory.ids if is_finite else ())
        exchange.commit(push, self._target).wait()
        job.stepped()
        job.leave_if_asked()
        return memory.values
