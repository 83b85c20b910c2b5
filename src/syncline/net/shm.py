"""Anonymous shared memory: sealed memfds, passed by file descriptor.

Without a name, nothing is left after a SIGKILL. It is sealed against resizing, which is checked before foreign memory
is mapped: a truncated file would kill its reader.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref

import numpy as np
import numpy.typing as npt

from syncline.errors import FrameError

Bytes = npt.NDArray[np.uint8]
_FUTURE_WRITE = 0x10  # Linux 5.1: later mappings are read-only; not in every fcntl module


class SharedMemory:
    """Bytes that another process can map through the file descriptor. `array` is all of it."""

    def __init__(self, fd: int, num_bytes: int, writable: bool) -> None:
        self.fd, self.num_bytes, self.writable = fd, num_bytes, writable
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        view = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, protection)
        self.array: Bytes = np.frombuffer(view, dtype=np.uint8)
        # The mapping ends with its last array; the descriptor with this object.
        self._closer = weakref.finalize(self, os.close, fd)

    def close(self) -> None:
        """Closes the descriptor; the bytes are freed with the last array."""
        self._closer()
        self.array = np.empty(0, np.uint8)


def create(num_bytes: int, *, for_all: bool = False) -> SharedMemory:
    """New shared memory, allocated at once: an OSError here instead of a bus error later.

    `for_all`: receivers may write it too.
    """
    size = max(num_bytes, mmap.PAGESIZE)
    fd = _anonymous_file()
    try:
        os.ftruncate(fd, size)
        _reserve(fd, size)
        memory = SharedMemory(fd, size, writable=True)
    except BaseException:
        os.close(fd)
        raise
    seal(fd, is_final=not for_all)
    return memory


def writable(memory: SharedMemory) -> SharedMemory:
    """The same memory, mapped writable; a FrameError if its owner does not allow it."""
    fd = os.dup(memory.fd)
    try:
        return SharedMemory(fd, memory.num_bytes, writable=True)
    except OSError as error:
        os.close(fd)
        raise FrameError(f"shared memory that cannot be written: {error}") from None


def accept(fd: int, num_bytes: int) -> SharedMemory:
    """Maps foreign memory read-only; refused if it is too small or could shrink."""
    size = max(num_bytes, mmap.PAGESIZE)
    try:
        actual = os.fstat(fd).st_size
        if actual != size:
            raise FrameError(f"shared memory of {actual} bytes where {size} were said")
        if hasattr(os, "memfd_create") and not _is_sealed(fd):
            raise FrameError("shared memory that is not sealed against shrinking and growing")
        return SharedMemory(fd, size, writable=False)
    except BaseException:
        os.close(fd)
        raise


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("syncline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # macOS has no memfd: an unlinked file has no name either.
    fd, path = tempfile.mkstemp(prefix="syncline-")
    os.unlink(path)
    return fd


def _reserve(fd: int, size: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    available = available_bytes()
    if available is not None and size > available:
        raise OSError(errno.ENOMEM, f"{size} bytes of shared memory wanted, {available} are there")
    os.posix_fallocate(fd, 0, size)


def available_bytes() -> int | None:
    """Available memory by the kernel's estimate and this process's cgroup; None if unknown."""
    found = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    found.append(int(line.split()[1]) * 1024)
                    break
    except (OSError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as most:
            limit = int(most.read())
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as current:
            found.append(max(0, limit - int(current.read())))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def bytes_for_each(num_processes: int, held_bytes: int = 0) -> int:
    """What each of so many equal processes of this host may take; 0: not known.

    `held_bytes`: they have these already, all together.
    """
    available = available_bytes()
    limits = [(available + held_bytes) // num_processes] if available else []
    try:
        import resource
    except ImportError:  # pragma: no cover - other systems
        return min(limits, default=0)
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    limits += [most] if most != resource.RLIM_INFINITY else []
    return min(limits, default=0)


def seal(fd: int, *, is_final: bool) -> None:
    if not hasattr(os, "memfd_create"):
        return
    import fcntl

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | (_FUTURE_WRITE if is_final else 0))
    except OSError:  # an older kernel: the receiver maps it read-only itself
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def _is_sealed(fd: int) -> bool:
    import fcntl

    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed == needed
    except OSError:
        return False
