"""Memory of a GPU that two processes of a host share, through the CUDA driver: allocated by one, mapped by the other.

Plain allocations (`cuMemAlloc`): only these have handles for other processes. A handle is 64 bytes, valid on its host
and in its IPC namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

from syncline.errors import SynclineError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class DeviceMemoryError(SynclineError):
    """The CUDA driver refused."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


def namespace() -> str:
    """The IPC namespace of this process: handles are valid within one."""
    try:
        return os.readlink("/proc/self/ns/ipc")
    except OSError:
        return ""


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceMemoryError(f"there is no CUDA driver here: {error}") from None


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise DeviceMemoryError(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


@contextlib.contextmanager
def _on(device: int) -> Iterator[None]:
    """The context that the runtime, and with it torch, uses on this device is current in this thread."""
    driver, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuInit(0), "the CUDA driver does not start")
    _check(driver.cuDeviceGet(ctypes.byref(handle), device), f"GPU {device}")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"the context of GPU {device}")
    try:
        _check(driver.cuCtxPushCurrent_v2(context), f"the context of GPU {device}")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(handle)


class DeviceMemory:
    """Memory on a GPU, as an array for torch (`__cuda_array_interface__`). It must outlive its tensors."""

    def __init__(self, device: int, address: int, num_bytes: int, *, is_mapped: bool) -> None:
        self.device, self.num_bytes = device, num_bytes
        self._address, self._is_mapped = address, is_mapped
        self._lock = threading.Lock()

    @staticmethod
    def allocate(device: int, num_bytes: int) -> DeviceMemory:
        address = ctypes.c_uint64()
        with _on(device):
            _check(_driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)), "cuMemAlloc")
        return DeviceMemory(device, address.value, num_bytes, is_mapped=False)

    @staticmethod
    def map(device: int, handle: bytes, num_bytes: int) -> DeviceMemory:
        """The memory of another process; `num_bytes`: at least so many."""
        if len(handle) != HANDLE_BYTES:
            raise DeviceMemoryError(f"a handle of {len(handle)} bytes")
        driver, address, size = _driver(), ctypes.c_uint64(), ctypes.c_size_t()
        with _on(device):
            given = _Handle.from_buffer_copy(handle)
            _check(
                driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), given, _LAZY_PEER_ACCESS), "cuIpcOpenMemHandle"
            )
            memory = DeviceMemory(device, address.value, num_bytes, is_mapped=True)
            code = driver.cuMemGetAddressRange_v2(None, ctypes.byref(size), address)
        if code or size.value < num_bytes:
            memory.close()
            raise DeviceMemoryError(f"memory of {size.value} bytes; {num_bytes} needed")
        return memory

    @property
    def handle(self) -> bytes:
        """What another process maps it by."""
        given = _Handle()
        with _on(self.device):
            _check(
                _driver().cuIpcGetMemHandle(ctypes.byref(given), ctypes.c_uint64(self._address)), "cuIpcGetMemHandle"
            )
        return bytes(given)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
            "strides": None,
        }

    def close(self) -> None:
        """Nothing on the GPU may use it any more."""
        with self._lock:
            address, self._address = self._address, 0
        if address:
            driver = _driver()
            with contextlib.suppress(DeviceMemoryError), _on(self.device):
                given = ctypes.c_uint64(address)
                _check(
                    driver.cuIpcCloseMemHandle(given) if self._is_mapped else driver.cuMemFree_v2(given),
                    "freed memory",
                )
