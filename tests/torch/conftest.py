"""A device without a device: copies that are queued, and happen late, at random, or only when somebody waits."""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from syncline.launch import embedded
from syncline.net.device_channel import DeviceChannel
from syncline.server.device_storage import bytes_at
from syncline.torch import carriers, optimizer
from syncline.worker.checkpoint.rng_state import forget_seed


@pytest.fixture(autouse=True)
def process_groups_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To connect; less than a thread may outlast its test, since one that connects to the dead is not to be ended."""
    monkeypatch.setattr("syncline.reduce.process_group.CONNECT_SECONDS", 45.0)


@pytest.fixture(autouse=True)
def no_seed_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test gave to torch.manual_seed or seed_everything is not this test's."""
    torch.manual_seed(1 << 60)
    monkeypatch.setattr("syncline.torch.data.SEED_AT_IMPORT", 1 << 60)
    forget_seed()


class SlowMark:
    """A place in the queue of a `SlowSide`."""

    def __init__(self, side: SlowSide, position: int) -> None:
        self._side, self._position = side, position

    def done(self) -> bool:
        self._side.go_on_by_chance()
        return self._side.num_done >= self._position

    def wait(self) -> None:
        self._side.go_on_to(self._position)

    def order(self) -> None:
        self._side.go_on_to(self._position)  # the caller's stream is the CPU itself


class SlowSide:
    """A twin of `CudaSide` over CPU tensors: nothing is copied before it must be, but for chance."""

    def __init__(self, seed: int, chance: float) -> None:
        self._random, self._chance = random.Random(seed), chance
        self._queue: collections.deque[Callable[[], Any]] = collections.deque()
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}
        self._lock = threading.RLock()
        self.num_queued = self.num_done = 0

    def current(self) -> int:
        return threading.get_ident()

    def follow(self, stream: Any = None) -> None:
        """Streams have done everything already."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._lock, torch.no_grad():
            self._queue.append(lambda: target.copy_(source))
            self.num_queued += 1
        self.go_on_by_chance()

    def mark(self) -> SlowMark:
        return SlowMark(self, self.num_queued)

    def host_memory(self, array: Any) -> torch.Tensor:
        key = array.ctypes.data
        if key not in self._known:
            self._known[key] = (bytes_at(array), array)
        return self._known[key][0]

    def new_host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def go_on_by_chance(self) -> None:
        while self._random.random() < self._chance and self.num_done < self.num_queued:
            self.go_on_to(self.num_done + 1)

    def go_on_to(self, position: int) -> None:
        with self._lock, torch.no_grad():
            while self.num_done < position:
                self._queue.popleft()()
                self.num_done += 1


ON_A_GPU = pytest.param(None, id="gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))

if torch.cuda.is_available():
    torch.zeros(1, device="cuda")  # what CUDA opens for itself is no leak of a test


@pytest.fixture(params=[pytest.param(0.0, id="late"), pytest.param(0.3, id="random"), ON_A_GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A GPU, or the CPU going the way of a GPU: by copies that come late, or at random."""
    monkeypatch.setattr(carriers, "BUCKET_BYTES", 600)  # so that small models leave in several
    if request.param is None:
        yield "cuda:0"
        return
    opened = go_the_slow_way(monkeypatch.setattr, request.param)
    monkeypatch.setattr(embedded, "DeviceChannel", lambda device: DeviceChannel("cpu"))  # also where there is a GPU
    yield "cpu"
    assert opened, "nothing went the way of a device"


def go_the_slow_way(setattr: Callable[[Any, str, Any], None], chance: float) -> list[SlowSide]:
    """CPU tensors go the way of a GPU's; the sides that were opened."""
    opened: list[SlowSide] = []

    def open_side(device: torch.device, say: Callable[[str], None]) -> SlowSide:
        opened.append(SlowSide(len(opened), chance))
        return opened[-1]

    setattr(optimizer, "open_side", open_side)
    return opened


@pytest.fixture
def slow_side() -> SlowSide:
    """Copies nothing before it must."""
    return SlowSide(0, 0.0)
