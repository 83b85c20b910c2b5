"""Calls from compiled code to the job: the exchange stands in an ordered callback of the compiled step.

JAX returns from a compiled step before its callback has run. Therefore the job waits for callbacks before the script
gets its next batch, and at rests and barriers: a commit acknowledges the samples of its own step only, and one thread
at a time uses the job.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from syncline.jax.ordered_calls import ordered_call
from syncline.jax.packages import jax
from syncline.jax.trees import is_traced, placed, shapes_of
from syncline.worker.host_memory import HostArray
from syncline.worker.job import Job

_inside = threading.local()
_known: weakref.WeakKeyDictionary[Job, HostCalls] = weakref.WeakKeyDictionary()


def is_inside() -> bool:
    """Whether this is a callback: its device may wait for it, and can compute nothing else meanwhile."""
    return bool(getattr(_inside, "is_set", False))


def calls_of(job: Job) -> HostCalls:
    """The calls of this job."""
    if job not in _known:
        _known[job] = HostCalls(job)
    return _known[job]


class HostCalls:
    """Runs functions on host arrays: at once, or from compiled code."""

    def __init__(self, job: Job) -> None:
        self._error: BaseException | None = None  # of a callback, for the script's thread
        alive = weakref.ref(self)

        def drain() -> None:
            if (own := alive()) is not None:
                own.drain()

        for register in (job.samples.before_batch, job.before_rest, job.before_settle):
            register(drain)

    def drain(self) -> None:
        """Waits for the callbacks of steps that are under way, and raises what they raised."""
        if is_inside():
            return
        try:
            jax.effects_barrier()
        except Exception:
            if self._error is None:
                raise
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def call(self, function: Callable[..., Sequence[HostArray]], like: Sequence[Any], *arguments: Any) -> list[Any]:
        """The results of a function of host arrays, each of the shape, type and devices of one of `like`."""
        if not is_traced(arguments):
            self.drain()
            return placed(function(*arguments), like)
        return self.call_traced(function, like, *arguments)

    def call_traced(
        self, function: Callable[..., Sequence[HostArray]], like: Sequence[Any], *arguments: Any
    ) -> list[Any]:
        """The same from compiled code."""
        shapes = shapes_of(like)

        def run(*given: Any) -> Any:
            return self._run(function, shapes, given)

        return ordered_call(run, shapes, *arguments)

    def _run(self, function: Callable[..., Sequence[HostArray]], shapes: Sequence[Any], given: Any) -> Any:
        _inside.is_set = True
        try:
            if self._error is not None:
                raise RuntimeError(f"an earlier step of this worker failed: {self._error}")
            return list(function(*given))
        except Exception as error:
            self._error = self._error or error
            raise
        except BaseException as error:  # the worker was asked to leave: the script's thread ends
            self._error = error
            # NumPy's: JAX's own would be computed on the device, which waits for this call.
            return [np.zeros(shape.shape, shape.dtype) for shape in shapes]
        finally:
            _inside.is_set = False
