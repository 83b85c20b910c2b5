"""Where a server's slices live: in the memory that workers read, or on a GPU, with that memory as their copy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from syncline.core.layout import Slice
from syncline.core.units import counted
from syncline.errors import ConfigError
from syncline.net.hatch import Hatch
from syncline.server.pinning import Bytes, Registered

_NOTHING = contextlib.nullcontext()


class Home:
    """Slices in host memory: rules run where the bytes lie."""

    hatch: Hatch | None = None  #: to the worker of this process
    is_lazy = False  #: whether host memory may be older than what rules have come to
    decay = 0.0  #: of the average that is kept of parameters; 0: none is

    def adopt(self, memory: Bytes) -> None:
        """This memory holds slices, or arenas with gradients for them."""

    def release(self, memory: Bytes) -> None:
        """It is not used any more."""

    def numbers(self, host: torch.Tensor, part: Slice | None = None) -> torch.Tensor:
        """The tensor that rules work on, for a slice that lies here in host memory."""
        return host

    def bring(self, staged: torch.Tensor) -> torch.Tensor:
        """A staged gradient, where rules can use it."""
        return staged

    def at_work(self) -> AbstractContextManager[object]:
        """Around everything that one thread does with a slice."""
        return _NOTHING

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        """The host memory was written: rules begin with what is there."""

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        """Workers read the host memory: it holds the new numbers when this returns."""

    def refresh(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        """Somebody reads the host memory: it holds what rules have come to."""

    def settle(self) -> None:
        """What this thread has begun is done when this returns."""

    def close(self) -> None:
        """Lets go of the memory that was adopted."""


class DeviceHome(Home):
    """Slices on a GPU. Every thread works on a stream of its own; what workers read is complete when it is told."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device = device
        self._registered = Registered(device, say)
        self._threads = threading.local()

    def adopt(self, memory: Bytes) -> None:
        if memory.nbytes:
            self._registered.tensor(memory)

    def release(self, memory: Bytes) -> None:
        self._registered.release(memory)

    def numbers(self, host: torch.Tensor, part: Slice | None = None) -> torch.Tensor:
        return host.to(self._device)

    def bring(self, staged: torch.Tensor) -> torch.Tensor:
        return staged.to(self._device, non_blocking=True)

    def at_work(self) -> AbstractContextManager[object]:
        if not hasattr(self._threads, "stream"):
            self._threads.stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._threads.stream)

    def load(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        numbers.copy_(host)

    def publish(self, numbers: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(numbers, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self._registered.close()


def home_of(name: str, say: Callable[[str], None]) -> Home:
    """The home that `--server-device` names; a ConfigError where there is no such device."""
    if name == "cpu":
        return Home()
    index = int(name.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        there = f"torch sees {counted(count, 'GPU') if count else 'no GPUs'} on the server's host"
        raise ConfigError(f"--server-device {name}: {there}; leave it out, or say cpu")
    return DeviceHome(torch.device("cuda", index), say)
