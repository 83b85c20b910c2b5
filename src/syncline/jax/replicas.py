"""Steps of a transform on every worker, on the mean gradient of each round: `sync`, for any transform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from syncline.jax.host_calls import HostCalls, is_inside
from syncline.jax.packages import jax
from syncline.jax.trees import Tree, decoded, encoded, placed
from syncline.worker.host_memory import HostArray
from syncline.worker.job import Job
from syncline.worker.replicated_steps import ReplicatedSteps


class Replicas:
    """Parameters and optimizer state are the same in all workers."""

    def __init__(self, job: Job, calls: HostCalls, params: Any, state: Any, transform: Any) -> None:
        self._calls, self._transform = calls, transform
        self._params, self._state = Tree(params), Tree(state, "optimizer.")
        leaves, inner = self._params.leaves(params, "parameters"), self._state.leaves(state, "optimizer state")
        self._like = dict(zip(self._state.names, inner, strict=True))
        self._apply = jax.jit(self._applied)
        self._behind: Mapping[str, HostArray] = {}
        self._has_extra = False  # steps have arguments that are not known outside of `update`
        self._steps = ReplicatedSteps(
            job, self._params.named(leaves), self._named(leaves, inner), self._apply_on_host
        )

    def _named(self, params: Any, state: Any) -> dict[str, HostArray]:
        return {**self._params.named(params), **encoded(self._state.named(state))}

    def _decoded(self, replica: Mapping[str, HostArray]) -> list[HostArray]:
        """The leaves of the optimizer state."""
        return [decoded(replica[name], self._like[name]) for name in self._state.names]

    def _applied(self, mean: Any, state: Any, params: Any) -> tuple[list[Any], list[Any]]:
        updates, state = self._transform.update(mean, state, params)
        new = jax.tree_util.tree_map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        return self._params.leaves(new, "parameters"), self._state.leaves(state, "optimizer state")

    def _apply_on_host(
        self, replica: Mapping[str, HostArray], mean: Mapping[str, HostArray]
    ) -> dict[str, HostArray] | None:
        if is_inside() or self._has_extra:
            return None
        # Copies: JAX may keep the memory that it gets.
        parts = [[np.array(a) for a in some] for some in (self._params.listed(mean), self._decoded(replica))]
        params = self._params.build([np.array(array) for array in self._params.listed(replica)])
        return self._named(*self._apply(self._params.build(parts[0]), self._state.build(parts[1]), params))

    def update(self, grads: Any, state: Any, params: Any, weight: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        old, inner = self._params.leaves(params, "parameters"), self._state.leaves(state, "optimizer state")
        gradients, self._has_extra = self._params.leaves(grads, "gradients"), bool(extra)

        def step(gradients: Any, before: Any, inner: Any, weight: Any) -> list[Any]:
            mean, replica = self._steps.step(
                self._params.named(gradients), lambda: self._named(before, inner), weight
            )
            self._behind = replica or {}
            return [*self._params.listed(mean), np.bool_(replica is not None)]

        def take() -> list[Any]:
            return [*self._params.listed(self._behind), *self._decoded(self._behind)]

        flag = jax.numpy.zeros((), bool)
        *mean, is_behind = self._calls.call(step, [*gradients, flag], gradients, old, inner, weight)
        own = [*old, *inner]
        if isinstance(is_behind, jax.core.Tracer):
            here = jax.lax.cond(is_behind, lambda: self._calls.call_traced(take, own), lambda: _plain(own))
        else:
            is_behind = bool(is_behind)
            here = placed(take(), own) if is_behind else own
        at, inner = self._params.build(here[: len(old)], params), self._state.build(here[len(old) :], state)
        updates, state = self._transform.update(self._params.build(mean, grads), inner, at, **extra)
        if is_behind is False:
            return updates, state
        changes = zip(here, self._params.leaves(updates, "updates"), old, strict=False)
        moved = [jax.numpy.where(is_behind, p + u - before, u) for p, u, before in changes]
        return self._params.build(moved, updates), state

    def latest(self, params: Any, state: Any) -> tuple[Any, Any]:
        newest = self._steps.newest()
        if newest is None:
            return params, state
        old, inner = self._params.leaves(params, "parameters"), self._state.leaves(state, "optimizer state")
        new = placed([*self._params.listed(newest), *self._decoded(newest)], [*old, *inner])
        return self._params.build(new[: len(old)], params), self._state.build(new[len(old) :], state)


def _plain(leaves: list[Any]) -> list[Any]:
    """Both branches of a condition must have the same types; those of callbacks are never weak."""
    return [jax.lax.convert_element_type(leaf, leaf.dtype) for leaf in leaves]
