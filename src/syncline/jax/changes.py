"""Steps of a transform on this worker; its changes are pushed: `bounded`, `async`, `--sync-every`."""

from __future__ import annotations

from typing import Any

import numpy as np

from syncline.jax.host_calls import HostCalls
from syncline.jax.trees import Tree, placed
from syncline.worker.host_optimizer import HostOptimizer
from syncline.worker.job import Job


class Changes:
    """The optimizer state is this worker's own. The answer to a push has the changes of the other workers too."""

    def __init__(self, job: Job, calls: HostCalls, params: Any, transform: Any) -> None:
        self._calls, self._tree, self._transform = calls, Tree(params), transform
        self._host = HostOptimizer(job, self._tree.named(self._tree.leaves(params, "parameters")), None)

    def update(self, grads: Any, state: Any, params: Any, weight: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        tree = self._tree
        old = tree.leaves(params, "parameters")
        tree.leaves(grads, "gradients")
        updates, state = self._transform.update(grads, state, params, **extra)

        def step(change: Any, before: Any, weight: Any) -> list[Any]:
            start, change = self._host.new_values() or tree.named(before), tree.named(change)
            end = {name: np.asarray(start[name] + change[name], start[name].dtype) for name in tree.names}
            return tree.listed(self._host.local_step(end, weight=weight) or end)

        new = self._calls.call(step, old, tree.leaves(updates, "updates"), old, weight)
        return tree.build([after - before for after, before in zip(new, old, strict=True)], params), state

    def latest(self, params: Any, state: Any) -> tuple[Any, Any]:
        old = self._tree.leaves(params, "parameters")
        return self._tree.build(placed(self._tree.listed(self._host.pull()), old), params), state
