"""Requests wait, become batches, and are answered: one thread calls the model."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

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
        call_seconds: float = 0.0,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """`knows_shapes`: what the model refuses after the checks is its own failure, not the caller's.
        `call_seconds`: how long one call of the model may take; 0.0: any time. `on_hang` is called by `sweep`, once
        for each call that takes longer.
        """
        self._versions, self._policy, self._metrics = versions, policy, metrics
        self._most_queued, self._knows_shapes = most_queued, knows_shapes
        self._call_seconds, self._on_hang = call_seconds, on_hang
        self._call_began = 0.0  # 0.0: the model is not called now
        self._batch: Sequence[_Queued] = ()  # that the thread works at
        self._told_hang = 0.0  # when the call began whose hang was told
        self._condition = threading.Condition(threading.Lock())
        self._queues: dict[_Key, collections.deque[_Queued]] = {}
        self._num_queued = self._num_rows = 0
        self._awaited = 0  # rows that end the thread's wait; 0: it does not wait
        self._is_closed = False
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

    @property
    def hangs(self) -> bool:
        """Whether the model has not returned from a call for too long. It may still return."""
        began = self._call_began
        return bool(self._call_seconds and began) and time.monotonic() - began > self._call_seconds

    def sweep(self) -> None:
        """Again and again in the event loop: if the model hangs, requests that wait get an error."""
        began = self._call_began
        if not self.hangs:
            return
        with self._condition:
            if self._call_began != began:
                return  # it has returned meanwhile
            waiting = [*self._batch, *(queued for queue in self._queues.values() for queued in queue)]
            self._queues.clear()
            self._num_queued = self._num_rows = 0
        _resolve(waiting, [self._hang_error()] * len(waiting))
        if self._told_hang != began:
            self._told_hang = began
            log.error(
                "the model has not returned from a call for %g s (--call-timeout); %d requests got an error, and "
                "none is taken until it returns",
                self._call_seconds,
                len(waiting),
            )
            self._on_hang()

    def _hang_error(self) -> RequestError:
        return RequestError(503, f"the model has not returned from a call for {self._call_seconds:g} s", 1.0)

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
            if self.hangs:
                raise self._hang_error()
            if self._num_queued >= self._most_queued:
                raise RequestError(503, f"{self._num_queued} requests wait already; send it again later", 1.0)
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = collections.deque()
            queue.append(queued)
            self._num_queued += 1
            self._num_rows += num_rows
            if self._awaited and self._num_rows >= self._awaited:
                self._awaited = 0
                self._condition.notify()
        return future

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            num_rows, began = sum(queued.num_rows for queued in batch), time.monotonic()
            try:
                self._answer(batch, num_rows)
            except BaseException as error:  # this thread must not end: nothing would be answered any more
                log.exception("a batch of %d failed", num_rows)
                answer = RequestError(500, f"the batch failed: {type(error).__name__}: {str(error)[:300]}")
                _deliver(batch, [answer] * len(batch))
            self._batch = ()
            now = time.monotonic()
            self._policy.finished(num_rows, self._num_rows, now - began, now)

    def _take(self) -> list[_Queued] | None:
        with self._condition:
            while True:
                if self._num_queued:
                    oldest = min(queue[0].arrived for queue in self._queues.values())
                    now = time.monotonic()
                    wait = 0.0 if self._is_closed else self._policy.wait_seconds(self._num_rows, oldest, now)
                elif self._is_closed:
                    return None
                else:
                    wait = None
                if wait is None or wait > 0.0:
                    self._awaited = 1 if wait is None else self._policy.wanted_rows
                    self._condition.wait(wait)
                    self._awaited = 0
                    continue
                key = min(self._queues, key=lambda key: self._queues[key][0].arrived)
                batch = self._take_from(key)
                if batch:
                    self._batch = batch
                    self._policy.taken(sum(queued.num_rows for queued in batch))
                    return batch

    def _take_from(self, key: _Key) -> list[_Queued]:
        """Under the lock: the next batch of this queue. Requests whose clients are gone are dropped."""
        queue = self._queues[key]
        batch: list[_Queued] = []
        num_rows = 0
        while queue and (not batch or num_rows + queue[0].num_rows <= self._policy.max_rows):
            queued = queue.popleft()
            self._num_queued -= 1
            self._num_rows -= queued.num_rows
            if not queued.future.done():
                batch.append(queued)
                num_rows += queued.num_rows
        if not queue:
            del self._queues[key]
        return batch

    def _answer(self, batch: Sequence[_Queued], num_rows: int) -> None:
        version = batch[0].version or self._versions.current
        assert version is not None
        answers: list[BatchAnswer | RequestError]
        try:
            outputs = self._call(version, batch, num_rows)
        except RequestError as error:
            if len(batch) > 1:  # one request of a batch must not harm the others
                for queued in batch:
                    if not queued.future.done():
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
        """Keeps inputs at which a new version can be tried: those with finite answers, of one call of the model."""
        num_rows = min(queued.num_rows, self._policy.max_rows)
        inputs = {name: array[:num_rows] for name, array in queued.inputs.items()}
        if sum(array.nbytes for array in inputs.values()) > _MOST_RECENT_BYTES:
            return
        rows = (array[:num_rows] for array in outputs.values())
        if all(array.dtype.kind != "f" or np.isfinite(array).all() for array in rows):
            if num_rows < queued.num_rows:
                inputs = {name: array.copy() for name, array in inputs.items()}  # a view keeps all rows in memory
            with self._condition:
                self._recent.append(inputs)

    def _call(self, version: Version, batch: Sequence[_Queued], num_rows: int) -> dict[str, Array]:
        if len(batch) == 1:
            inputs = batch[0].inputs
        else:
            inputs = {name: np.concatenate([queued.inputs[name] for queued in batch]) for name in batch[0].inputs}
        most = self._policy.max_rows
        if num_rows <= most:
            return self._call_once(version, inputs, num_rows)
        parts = []
        for begin in range(0, num_rows, most):
            if batch[0].future.done():
                raise RequestError(503, "nothing waits for the rest of these rows")  # its client is gone
            part = {name: array[begin : begin + most] for name, array in inputs.items()}
            parts.append(self._call_once(version, part, min(most, num_rows - begin)))
        return _joined(parts)

    def _call_once(self, version: Version, inputs: Mapping[str, Array], num_rows: int) -> dict[str, Array]:
        self._metrics.batch_rows.observe(num_rows)
        self._call_began = time.monotonic()
        try:
            outputs = version.model(inputs)
        except RequestError:
            raise
        except (Exception, SystemExit) as error:  # the operator's code, or inputs that it does not take
            words = f"{type(error).__name__}: {str(error)[:300]}"
            if self._knows_shapes:
                log.warning("version %s failed on a batch of %d: %s", version.name, num_rows, words)
                raise RequestError(500, f"the model failed: {words}") from error
            shapes = {name: list(array.shape) for name, array in inputs.items()}
            raise RequestError(400, f"the model does not take inputs of shape {shapes}: {words}") from error
        finally:
            self._call_began = 0.0
        check_outputs(outputs, num_rows)
        return outputs


def _joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The outputs of several calls of one version as those of one call."""
    try:
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    except (KeyError, ValueError) as error:
        raise RequestError(
            500,
            f"the outputs of several calls do not fit together: {error}; raise --max-batch or send fewer rows",
        ) from None


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
