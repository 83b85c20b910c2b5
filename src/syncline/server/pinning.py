"""Host memory that a GPU copies fast: registered with its driver, and let go again before it goes."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
#: cudaHostRegisterReadOnly: for memory that is mapped without the right to write.
_READ_ONLY = 8
_REGISTERED_ALREADY = 712
#: Below this, memory that could not be registered is nothing to speak of.
_WORTH_A_WORD = 1 << 20


class Registered:
    """Memory that was registered with the GPU's driver, until this object goes."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device, self._say = device, say
        self._known: dict[tuple[int, int], tuple[torch.Tensor, Bytes]] = {}
        self._addresses: list[int] = []
        # What is mapped stays mapped until it is unregistered: the arrays go after this has run.
        self.close = weakref.finalize(self, _unregister, device, self._addresses, self._known)
        self.close.atexit = False  # the driver lets go of everything by itself then, maybe before us

    def tensor(self, array: Bytes) -> torch.Tensor:
        """The same bytes as a tensor; registered when it comes for the first time, and kept alive."""
        key = (array.ctypes.data, array.nbytes)
        if key not in self._known:
            self._register(array)
            self._known[key] = (bytes_at(array), array)
        return self._known[key][0]

    def release(self, array: Bytes) -> None:
        """This memory is to go before this object does."""
        address = array.ctypes.data
        if self._known.pop((address, array.nbytes), None) is not None and address in self._addresses:
            self._addresses.remove(address)
            _unregister(self._device, [address], {})

    def _register(self, array: Bytes) -> None:
        flags = 0 if array.flags.writeable else _READ_ONLY
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, flags))
            if code:
                _forget_error(self._device)
            else:
                self._addresses.append(array.ctypes.data)
        # In one process a server and its worker share memory: whoever comes second finds it registered.
        if code not in (0, _REGISTERED_ALREADY) and array.nbytes >= _WORTH_A_WORD:
            self._say(f"memory could not be registered with the GPU (CUDA error {code}): copies are slower")


def _unregister(device: torch.device, addresses: list[int], known: dict[Any, Any]) -> None:
    codes = [int(torch.cuda.cudart().cudaHostUnregister(address)) for address in addresses]
    if any(codes):
        _forget_error(device)
    known.clear()


def _forget_error(device: torch.device) -> None:
    """The runtime remembers a failed call; the next check of torch raises it, and it is forgotten."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def bytes_at(array: Bytes) -> torch.Tensor:
    """A tensor over the memory of an array, which must outlive it; also of one that may not be written."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    # from_numpy warns of read-only arrays; nobody writes through this one.
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)
