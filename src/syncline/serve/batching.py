"""Requests wait, become batches, and are answered: one thread calls the model."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from syncline.serve.batch_policy import BatchPolicy
from syncline.serve.datatypes import Array, RequestError
from syncline.serve.metrics import ServingMetrics
from syncline.serve.model import check_outputs
from syncline.serve.versions import Version, Versions

log = logging.getLogger("syncline.serve")

_END_SECONDS = 0.3
_RECENT = 16  # requests at which a new version is tried
_MOST_RECENT_BYTES = 1 << 20  # of each
_Key = tuple[str, tuple[tuple[int, ...], ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The outputs of one request, and the version that gave them."""

    outputs: dict[str, Array]
    version: str


@dataclasses.dataclass(slots=True)
class _Queued:
    inputs: Mapping[str, Array]
    num_rows: int
    version: Version | None  # None: the current one when its batch begins
    arrived: float
    future: asyncio.Future[BatchAnswer]


class Batcher:
    """One queue and one thread. `submit` is called in the event loop."""

    def __init__(
        self,
        versions: Versions[Version],
        policy: BatchPolicy,
        metrics: ServingMetrics,
        *,
        most_queued: int,
        knows_shapes: bool,
    ) -> None:
        """`knows_shapes`: what the model refuses after the checks is its own failure, not the caller's."""
        self._versions, self._policy, self._metrics = versions, policy, metrics
        self._most_queued, self._knows_shapes = most_queued, knows_shapes
        self._condition = threading.Condition(threading.Lock())
        self._queues: dict[_Key, collections.deque[_Queued]] = {}
        self._num_queued = self._num_rows = 0
        self._is_waiting = self._is_closed = False
        self._recent: collections.deque[dict[str, Array]] = collections.deque(maxlen=_RECENT)
        self._thread = threading.Thread(target=self._run, name="syncline serve batches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Takes no more requests and ends the thread. A call of the model that does not end is left alone."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    @property
    def num_queued(self) -> int:
        return self._num_queued

    def recent(self) -> list[dict[str, Array]]:
        """Inputs of recent requests."""
        with self._condition:
            return list(self._recent)

    def submit(
        self, inputs: Mapping[str, Array], num_rows: int, version: str, loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[BatchAnswer]:
        """Queues a request. RequestError: no such version, or the queue is full."""
        chosen: Version | None
        if version:
            chosen = self._versions.find(version)
            if chosen is None:
                loaded = ", ".join(one.name for one in self._versions.loaded())
                raise RequestError(404, f"there is no version {version!r} in memory; there are {loaded}")
        else:
            chosen = self._versions.draw()
            if chosen is self._versions.current:
                chosen = None
        key = (chosen.digest if chosen is not None else "", tuple(array.shape[1:] for array in inputs.values()))
        future: asyncio.Future[BatchAnswer] = loop.create_future()
        queued = _Queued(inputs, num_rows, chosen, time.monotonic(), future)
        with self._condition:
            if self._is_closed:
                raise RequestError(503, "the server ends; send the request again", 1.0)
            if self._num_queued >= self._most_queued:
                raise RequestError(503, f"{self._num_queued} requests wait already; send it again later", 1.0)
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = collections.deque()
            queue.append(queued)
            self._num_queued += 1
            self._num_rows += num_rows
            if self._is_waiting:
                self._condition.notify()
        return future

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            num_rows = sum(queued.num_rows for queued in batch)
            self._answer(batch, num_rows)
            self._policy.finished(num_rows, self._num_rows)

    def _take(self) -> list[_Queued] | None:
        with self._condition:
            while True:
                if self._num_queued:
                    oldest = min(queue[0].arrived for queue in self._queues.values())
                    now = time.monotonic()
                    wait = 0.0 if self._is_closed else self._policy.wait_seconds(self._num_rows, oldest, now)
                    if wait <= 0.0:
                        break
                elif self._is_closed:
                    return None
                else:
                    wait = None
                self._is_waiting = True
                self._condition.wait(wait)
                self._is_waiting = False
            key = min(self._queues, key=lambda key: self._queues[key][0].arrived)
            queue = self._queues[key]
            batch = [queue.popleft()]
            num_rows = batch[0].num_rows
            while queue and num_rows + queue[0].num_rows <= self._policy.max_rows:
                batch.append(queue.popleft())
                num_rows += batch[-1].num_rows
            if not queue:
                del self._queues[key]
            self._num_queued -= len(batch)
            self._num_rows -= num_rows
            self._policy.taken(num_rows)
            return batch

    def _answer(self, batch: Sequence[_Queued], num_rows: int) -> None:
        version = batch[0].version or self._versions.current
        assert version is not None
        self._metrics.batch_rows.observe(num_rows)
        answers: list[BatchAnswer | RequestError]
        try:
            outputs = self._call(version, batch, num_rows)
        except RequestError as error:
            if len(batch) > 1:  # one request of a batch must not harm the others
                for queued in batch:
                    self._answer([queued], queued.num_rows)
                return
            answers = [error]
        else:
            self._remember(batch[0], outputs)
            answers, begin = [], 0
            for queued in batch:
                end = begin + queued.num_rows
                answers.append(BatchAnswer({name: array[begin:end] for name, array in outputs.items()}, version.name))
                begin = end
        _deliver(batch, answers)

    def _remember(self, queued: _Queued, outputs: Mapping[str, Array]) -> None:
        """Keeps inputs at which a new version can be tried: those with finite answers."""
        if sum(array.nbytes for array in queued.inputs.values()) > _MOST_RECENT_BYTES:
            return
        rows = (array[: queued.num_rows] for array in outputs.values())
        if all(array.dtype.kind != "f" or np.isfinite(array).all() for array in rows):
            with self._condition:
                self._recent.append(dict(queued.inputs))

    def _call(self, version: Version, batch: Sequence[_Queued], num_rows: int) -> dict[str, Array]:
        if len(batch) == 1:
            inputs = batch[0].inputs
        else:
            inputs = {name: np.concatenate([queued.inputs[name] for queued in batch]) for name in batch[0].inputs}
        try:
            outputs = version.model(inputs)
        except RequestError:
            raise
        except Exception as error:  # the operator's code, or inputs that it does not take
            words = f"{type(error).__name__}: {str(error)[:300]}"
            if self._knows_shapes:
                log.warning("version %s failed on a batch of %d: %s", version.name, num_rows, words)
                raise RequestError(500, f"the model failed: {words}") from error
            shapes = {name: list(array.shape) for name, array in inputs.items()}
            raise RequestError(400, f"the model does not take inputs of shape {shapes}: {words}") from error
        check_outputs(outputs, num_rows)
        return outputs


def _deliver(batch: Sequence[_Queued], answers: Sequence[BatchAnswer | RequestError]) -> None:
    loop = batch[0].future.get_loop()
    try:
        loop.call_soon_threadsafe(_resolve, batch, answers)
    except RuntimeError:  # the loop was closed, and its callers with it
        log.debug("%d answers came after the end", len(batch))


def _resolve(batch: Sequence[_Queued], answers: Sequence[BatchAnswer | RequestError]) -> None:
    for queued, answer in zip(batch, answers, strict=True):
        if queued.future.done():
            continue  # its client is gone
        if isinstance(answer, RequestError):
            queued.future.set_exception(answer)
        else:
            queued.future.set_result(answer)
