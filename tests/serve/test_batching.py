"""The thread that calls the model: large requests, clients that are gone, models that hang or end their thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline.serve.batch_policy import BatchPolicy
from syncline.serve.batching import Batcher
from syncline.serve.datatypes import RequestError
from syncline.serve.metrics import ServingMetrics
from syncline.serve.versions import Version, Versions

Model = Callable[[Mapping[str, Any]], dict[str, Any]]


def version(number: int, model: Model) -> Version:
    return Version(str(number), f"d{number}", "", number, model)


@contextlib.asynccontextmanager
async def batching(versions: Versions[Version], max_rows: int = 4, **settings: Any) -> AsyncIterator[Batcher]:
    batcher = Batcher(
        versions, BatchPolicy(max_rows, 0.0), ServingMetrics(), most_queued=100, knows_shapes=True, **settings
    )
    batcher.start()
    try:
        yield batcher
    finally:
        batcher.close()


def submit(batcher: Batcher, rows: Any) -> asyncio.Future[Any]:
    rows = np.asarray(rows, np.float32)
    return batcher.submit({"x": rows}, len(rows), "", asyncio.get_running_loop())


async def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


class Held:
    """Doubles its input; calls wait while it is held."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.free = threading.Event()
        self.free.set()

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.sizes.append(len(inputs["x"]))
        assert self.free.wait(PATIENCE)
        return {"y": 2 * inputs["x"]}


def with_one(model: Model) -> Versions[Version]:
    versions: Versions[Version] = Versions()
    versions.add(version(1, model))
    return versions


def test_a_request_with_more_rows_than_a_batch_is_several_calls_of_one_version() -> None:
    """The version changes at the first of these calls: the others are still of the one that began."""
    sizes: list[int] = []
    versions: Versions[Version] = Versions()

    def first(inputs: Mapping[str, Any]) -> dict[str, Any]:
        sizes.append(len(inputs["x"]))
        if len(sizes) == 1:
            versions.add(version(2, lambda inputs: {"y": 3 * inputs["x"]}))
        return {"y": 2 * inputs["x"]}

    versions.add(version(1, first))

    async def run() -> None:
        rows = np.arange(10.0).reshape(10, 1)
        async with batching(versions) as batcher:
            answer = await submit(batcher, rows)
            assert (answer.outputs["y"] == 2 * rows).all() and answer.version == "1"
            assert sizes == [4, 4, 2]
            # A new version is tried at no more rows than it will be called with.
            assert [len(inputs["x"]) for inputs in batcher.recent()] == [4]
            assert (await submit(batcher, rows)).version == "2"

    asyncio.run(run())


def test_outputs_of_several_calls_that_do_not_fit_together_are_an_error() -> None:
    def ragged(inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": np.zeros((len(inputs["x"]), int(inputs["x"].max())))}

    async def run() -> None:
        async with batching(with_one(ragged)) as batcher:
            with pytest.raises(RequestError, match="do not fit together") as caught:
                await submit(batcher, [[1.0], [2.0], [3.0], [4.0], [5.0]])
            assert caught.value.status == 500

    asyncio.run(run())


def test_requests_of_clients_that_are_gone_are_not_computed() -> None:
    """Neither those that wait, nor the rest of a large one that has begun."""
    model = Held()

    async def run() -> None:
        async with batching(with_one(model)) as batcher:
            model.free.clear()
            large = submit(batcher, np.ones((8, 1)))
            await wait_for(lambda: bool(model.sizes))
            gone = [submit(batcher, np.ones((3, 1))) for _ in range(3)]
            last = submit(batcher, np.ones((2, 1)))
            for future in (large, *gone):
                future.cancel()
            model.free.set()
            assert (await last).version == "1"
            assert model.sizes == [4, 2] and batcher.num_queued == 0

    asyncio.run(run())


def test_when_the_model_hangs_requests_get_an_error_until_it_returns() -> None:
    """Nothing can end a call of the model. Clients must not wait for it for ever."""
    model = Held()
    told: list[str] = []

    async def run() -> None:
        settings: dict[str, Any] = {"call_seconds": 0.05, "on_hang": lambda: told.append("hangs")}
        async with batching(with_one(model), **settings) as batcher:
            model.free.clear()
            waiting = [submit(batcher, np.ones((4, 1)))]
            await wait_for(lambda: bool(model.sizes))
            waiting += [submit(batcher, np.ones((3, 1))) for _ in range(2)]
            await wait_for(lambda: batcher.hangs)
            for _ in range(2):
                batcher.sweep()
            for future in waiting:
                with pytest.raises(RequestError, match=r"has not returned from a call for 0\.05 s") as caught:
                    await future
                assert caught.value.status == 503
            with pytest.raises(RequestError, match="has not returned"):
                submit(batcher, np.ones((1, 1)))
            assert told == ["hangs"] and batcher.num_queued == 0
            model.free.set()
            await wait_for(lambda: not batcher.hangs)
            assert (await submit(batcher, np.ones((1, 1)))).version == "1"
            assert model.sizes == [4, 1]

    asyncio.run(run())


@pytest.mark.parametrize("error", [SystemExit, MemoryError, KeyboardInterrupt])
def test_no_error_of_the_model_ends_the_thread(error: type[BaseException]) -> None:
    """Else the server takes requests and answers none."""
    errors = [error("x")]

    def model(inputs: Mapping[str, Any]) -> dict[str, Any]:
        if errors:
            raise errors.pop()
        return {"y": inputs["x"]}

    async def run() -> None:
        async with batching(with_one(model)) as batcher:
            with pytest.raises(RequestError, match=error.__name__):
                await submit(batcher, np.ones((1, 1)))
            assert (await submit(batcher, np.ones((1, 1)))).version == "1"

    asyncio.run(run())
