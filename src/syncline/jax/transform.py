"""`distribute`: an optax transform that trains with the other workers of the job."""

from __future__ import annotations

import functools
from typing import Any

from syncline.core.policy import policy_of
from syncline.core.rule import Rule
from syncline.errors import ConfigError
from syncline.jax.changes import Changes
from syncline.jax.host_calls import calls_of
from syncline.jax.on_servers import OnServers
from syncline.jax.packages import needed
from syncline.jax.replicas import Replicas
from syncline.jax.trees import is_traced
from syncline.worker.current import current_job
from syncline.worker.job import Job


def distribute(transform: Any, *, job: Job | None = None) -> Any:
    """An optax `GradientTransformationExtraArgs` that makes the steps of the job; usable inside of `jit`.

    `transform` is an optax transform, which runs on the workers, or a `syncline.Rule`, which runs on the servers. In
    `sync` both equal one process on the global batch. In `bounded` and `async`, and with `--sync-every`, a transform
    runs on each worker, and its changes are added up.

    `init(params)` registers the parameters: call it outside of `jit`, in all workers, with the same tree. Then, and
    after each epoch, `params, state = tx.latest(params, state)` brings the newest of the job. `update` needs
    `params`. `weight=n` is this worker's share in the mean, by default the samples that a loader of ours has handed
    out. With a rule, other arguments are its options: `update(grads, state, params, lr=0.01)`.
    """
    optax = needed("optax", "syncline.jax.distribute")
    if not isinstance(transform, Rule):
        if not (hasattr(transform, "init") and hasattr(transform, "update")):
            raise ConfigError(
                f"distribute() takes an optax transform or a syncline.Rule, not {type(transform).__name__}"
            )
        transform = optax.with_extra_args_support(transform)
    steps = _Steps(transform, job)
    found = _kind()(steps.init, steps.update)
    found.latest = steps.latest
    return found


@functools.cache
def _kind() -> Any:
    """optax's type, with room for `latest`."""
    base = needed("optax").GradientTransformationExtraArgs
    return type("DistributedTransformation", (base,), {"__doc__": distribute.__doc__})


class _Steps:
    def __init__(self, transform: Any, job: Job | None) -> None:
        self._transform, self._job = transform, job
        self._steps: OnServers | Changes | Replicas | None = None

    def init(self, params: Any) -> Any:
        transform = self._transform
        state = needed("optax").EmptyState() if isinstance(transform, Rule) else transform.init(params)
        if is_traced(params):  # eval_shape, for example; nothing is registered
            return state
        job = self._job or current_job()
        calls = calls_of(job)
        calls.drain()
        if isinstance(transform, Rule):
            self._steps = OnServers(job, calls, params, transform)
        elif _has_replicas(job):
            self._steps = Replicas(job, calls, params, state, transform)
        else:
            self._steps = Changes(job, calls, params, transform)
        if job.config.on_plateau and not isinstance(transform, Rule):
            job.notice("--on-plateau does not change the learning rate of an optax transform; use a syncline.Rule")
        return state

    def update(self, updates: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        if params is None:
            raise ConfigError("distribute(): update() needs the parameters: tx.update(grads, state, params)")
        return self._known().update(updates, state, params, weight, extra)

    def latest(self, params: Any, state: Any) -> tuple[Any, Any]:
        """The newest parameters and optimizer state of the job: before the first step, after each epoch, and before
        an evaluation. Not inside of jit.
        """
        if is_traced((params, state)):
            raise ConfigError("distribute(): latest() asks the job and is not for compiled code; call it outside jit")
        calls_of(self._job or current_job()).drain()
        return self._known().latest(params, state)

    def _known(self) -> OnServers | Changes | Replicas:
        if self._steps is None:
            raise ConfigError("distribute(): call init(params) first, outside of jit: it registers the parameters")
        return self._steps


def _has_replicas(job: Job) -> bool:
    """Whether all workers get the mean gradient of every round."""
    policy = policy_of(job.config)
    is_mean = policy.aggregate is None and not policy.lr_per_worker
    return policy.stands_still and is_mean and not job.config.steps_locally
