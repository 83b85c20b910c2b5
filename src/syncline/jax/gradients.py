"""`push_pull` and `broadcast`: for scripts that keep their own optimizer."""

from __future__ import annotations

import weakref
from typing import Any

from syncline.core.layout import OWN_PREFIX
from syncline.core.rule import Rule
from syncline.errors import ConfigError
from syncline.jax.host_calls import calls_of
from syncline.jax.trees import Tree, decoded, encoded, is_traced, placed, shapes_of
from syncline.worker.current import current_job
from syncline.worker.host_memory import HostMemory
from syncline.worker.host_optimizer import free_prefix
from syncline.worker.job import Job
from syncline.worker.mean_gradients import MeanGradients, check_rounds

_means: weakref.WeakKeyDictionary[Job, dict[Any, MeanGradients]] = weakref.WeakKeyDictionary()


def push_pull(grads: Any, *, weight: Any = None, job: Job | None = None) -> Any:
    """The mean of the workers' gradients, a tree like `grads`: one step of the job. In `sync` only.

    Works inside of `jit`. `weight`: this worker's share in the mean; by default the samples that a loader of ours has
    handed out since the last step, else 1. Optimizer and parameters are the script's own: a worker that is restarted
    has neither. `distribute` gives it both.
    """
    job = job or current_job()
    check_rounds(job.config)
    tree, calls = Tree(grads), calls_of(job)
    leaves = tree.leaves(grads, "gradients")
    key = (tuple(tree.names), tuple((shape.shape, str(shape.dtype)) for shape in shapes_of(leaves)))
    if job.is_late:
        job.notice(
            "push_pull gives a worker that was started again neither parameters nor optimizer state; use "
            "syncline.jax.distribute",
            is_own=True,
        )

    def mean(gradients: Any, weight: Any) -> list[Any]:
        known, named = _means.setdefault(job, {}), tree.named(gradients)
        if key not in known:
            known[key] = MeanGradients(job, named)
        return tree.listed(known[key].mean(named, weight))

    return tree.build(calls.call(mean, leaves, leaves, weight))


def broadcast(tree: Any, *, job: Job | None = None) -> Any:
    """The chief's values of a tree: parameters that all workers begin with. All workers call it, outside of `jit`."""
    if is_traced(tree):
        raise ConfigError("broadcast() asks the job and is not for compiled code; call it outside jit")
    job = job or current_job()
    calls_of(job).drain()
    known = Tree(tree)
    leaves = known.leaves(tree, "tree")
    named = known.named(leaves)
    given = encoded(named)
    prefix = free_prefix(job, given, f"{OWN_PREFIX}broadcast.")
    values = HostMemory(job, given, Rule("Assign"), prefix).values
    return known.build(placed([decoded(values[name], named[name]) for name in known.names], leaves))
