"""The optimizer that a script gave: its learning rate, its count of steps, and what a checkpoint has of them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from syncline.errors import StoreError
from syncline.keras.backends import to_host
from syncline.worker.job import Job


class WrappedOptimizer:
    """`runs_on_worker`: then its state is saved with the script, since the servers do not have it."""

    def __init__(self, job: Job, inner: Any, *, runs_on_worker: bool) -> None:
        self._job, self._inner, self._runs_on_worker = job, inner, runs_on_worker
        self.num_steps = 0
        self._given_rate = self._last_rate = self.rate_now()

    @property
    def has_averages(self) -> bool:
        """Whether Keras sets the model's weights to their averages at the end of `fit`."""
        return bool(getattr(self._inner, "use_ema", False))

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(to_host(self._inner.learning_rate))

    @property
    def _has_schedule(self) -> bool:
        return not isinstance(self._inner._learning_rate, keras.Variable)

    def rate_now(self) -> float:
        """The learning rate that a script has set; 0: a schedule sets it."""
        return 0.0 if self._has_schedule else self.rate

    def set_rate(self, rate: float) -> None:
        """The job's learning rate, as the chief has it."""
        if not self._has_schedule and not np.isclose(self.rate, rate, rtol=1e-6, atol=0.0):
            self._inner.learning_rate = rate

    def stepped(self, rate: float | None = None) -> None:
        """Counts a step. `rate`: with which it was made, where the servers make it."""
        self.num_steps += 1
        if rate is not None:
            self._last_rate = 0.0 if self._has_schedule else rate

    # -- what is saved ------------------------------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        """The count of steps, for schedules; the learning rate; with an optimizer on the worker, its state."""
        found: dict[str, Any] = {"num_steps": self.num_steps, "given": self._given_rate}
        if keras.backend.backend() == "jax":  # whose variables have no values inside of an epoch
            return {**found, "rate": self._last_rate}
        state = [to_host(variable) for variable in self._inner.variables] if self._runs_on_worker else []
        return {**found, "rate": self.rate_now(), "state": state}

    def put_back(self, saved: Any) -> None:
        if getattr(self._inner._iterations, "_value", 0) is None:
            return  # Keras on JAX, inside of an epoch: it was done before `fit` began
        try:
            state, own = saved.get("state", []), self._inner.variables
            if len(state) == len(own) and self._runs_on_worker:
                for variable, value in zip(own, state, strict=True):
                    variable.assign(value)
            self.num_steps = int(saved["num_steps"])
            self._inner._iterations.assign(self.num_steps)
            if saved["given"] != self._given_rate:
                self._job.notice(
                    f"uses learning_rate = {self._given_rate} of the script; the checkpoint had {saved['given']}"
                )
            elif saved["rate"]:
                self.set_rate(float(saved["rate"]))
            self._job.state.num_loaded += 1
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"what was saved of the optimizer does not fit this one: {error}; use --fresh"
            ) from error
