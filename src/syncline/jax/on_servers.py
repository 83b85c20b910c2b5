"""Steps with a rule on the servers."""

from __future__ import annotations

from typing import Any

from syncline.core.rule import Rule, RuleSpec, check_rule
from syncline.errors import ConfigError
from syncline.jax.host_calls import HostCalls
from syncline.jax.packages import jax
from syncline.jax.trees import Tree, placed
from syncline.worker.host_optimizer import HostOptimizer
from syncline.worker.job import Job


class OnServers:
    """Gradients go to the servers, and the answer has the new parameters."""

    def __init__(self, job: Job, calls: HostCalls, params: Any, rule: Rule) -> None:
        if job.config.steps_locally:
            raise ConfigError(
                f"distribute({rule!r}): with --sync-every {job.config.sync_every} the optimizer runs on the workers; "
                "give an optax transform, e.g. distribute(optax.adam(1e-3))"
            )
        self._calls, self._tree, self._rule = calls, Tree(params), rule
        self._host = HostOptimizer(job, self._tree.named(self._tree.leaves(params, "parameters")), rule)

    def update(self, grads: Any, state: Any, params: Any, weight: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        tree = self._tree
        old = tree.leaves(params, "parameters")
        check_rule(RuleSpec(self._rule.name, dict.fromkeys(options, 0.0)))  # here: compiled code would wrap the error

        def step(gradients: Any, weight: Any, options: Any) -> list[Any]:
            plain = {name: value.item() for name, value in options.items()}
            values = self._host.step(tree.named(gradients), options=plain or None, weight=weight)
            return tree.listed(values)

        given = {name: jax.numpy.asarray(value) for name, value in options.items()}
        new = self._calls.call(step, old, tree.leaves(grads, "gradients"), weight, given)
        return tree.build([after - before for after, before in zip(new, old, strict=True)], params), state

    def latest(self, params: Any, state: Any) -> tuple[Any, Any]:
        old = self._tree.leaves(params, "parameters")
        return self._tree.build(placed(self._tree.listed(self._host.pull()), old), params), state
