"""The servers' rules compute what Keras computes: 50 steps, compared after each."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from syncline.keras import DistributedOptimizer
from syncline.keras.rules import why_on_worker
from syncline.worker.job import Job

NUM_STEPS = 50
SETS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"global_clipnorm": 0.5}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3}),
    ("Adam", {"weight_decay": 0.02}),
    ("AdamW", {}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
    ("RMSprop", {}),
    ("RMSprop", {"rho": 0.8, "momentum": 0.5, "epsilon": 1e-3}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.01}),
    ("Adagrad", {}),
    ("Adagrad", {"initial_accumulator_value": 0.5, "epsilon": 1e-3, "weight_decay": 0.01}),
]
#: On the worker: the delta path of one worker adds nothing but a rounding of the difference.
ON_WORKER: list[tuple[str, dict[str, Any]]] = [
    ("Nadam", {}),
    ("Lion", {}),
    ("SGD", {"clipnorm": 0.5}),
    ("SGD", {"clipvalue": 0.1, "momentum": 0.9}),
    ("Adam", {"use_ema": True, "ema_overwrite_frequency": 7}),
    ("SGD", {"gradient_accumulation_steps": 2}),
]


def _named(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) or "plain" if isinstance(value, dict) else str(value)


def _variables() -> list[Any]:
    rng = np.random.default_rng(3)
    shapes = [(4, 3), (3,), (2, 2, 2)]
    return [keras.Variable(rng.normal(size=s).astype("float32"), name=f"v{n}") for n, s in enumerate(shapes)]


def _both(name: str, options: dict[str, Any], rate: Any = 0.05) -> tuple[Any, Any]:
    kind = getattr(keras.optimizers, name)
    return kind(learning_rate=rate, **options), DistributedOptimizer(kind(learning_rate=rate, **options))


def _compare(plain: Any, distributed: Any, tolerance: float, change_rate: bool = True) -> None:
    here, there = _variables(), _variables()
    if plain.weight_decay:
        plain.exclude_from_weight_decay(var_names=["v1"])
        distributed.inner_optimizer.exclude_from_weight_decay(var_names=["v1"])
    plain.build(here)
    distributed.build(there)
    rng = np.random.default_rng(4)
    for step in range(NUM_STEPS):
        if change_rate and step in (10, 30):
            plain.learning_rate = distributed.learning_rate = 0.05 / (step / 5)
        gradients = [keras.ops.convert_to_tensor(rng.normal(size=v.shape).astype("float32")) for v in here]
        plain.apply(gradients, here)
        distributed.apply(gradients, there)
        for one, other in zip(here, there, strict=True):
            first, second = keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other)
            np.testing.assert_allclose(
                second, first, rtol=1e-6, atol=tolerance, err_msg=f"{one.path} after {step + 1}"
            )
    assert int(distributed.iterations) == int(plain.iterations)


@pytest.mark.parametrize(("name", "options"), SETS, ids=_named)
def test_a_rule_of_the_servers(job: Job, name: str, options: dict[str, Any]) -> None:
    plain, distributed = _both(name, options)
    assert why_on_worker(distributed.inner_optimizer) == ""
    # Keras computes Adam's 1 - 0.999 ** t in float32, where the first steps have five digits; servers do not.
    _compare(plain, distributed, 2e-5 if name.startswith("Adam") else 2e-6)


@pytest.mark.parametrize(("name", "options"), ON_WORKER, ids=_named)
def test_an_optimizer_on_the_worker(job: Job, name: str, options: dict[str, Any]) -> None:
    if "gradient_accumulation_steps" in options and keras.backend.backend() == "jax":
        pytest.skip("JAX compiles the condition of every eager step again")
    plain, distributed = _both(name, options)
    assert why_on_worker(distributed.inner_optimizer)
    _compare(plain, distributed, 2e-5)


def test_a_schedule(job: Job) -> None:
    """Its rate at each step travels with the step."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=5, decay_rate=0.5)
    _compare(*_both("RMSprop", {}, schedule), 2e-6, change_rate=False)
