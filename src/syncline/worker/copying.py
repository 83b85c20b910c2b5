"""Work on many bytes, copies above all, shared among as many threads as this process may use."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from syncline.config import num_threads
from syncline.worker.arrays import Bytes

#: A thread is worth waking for at least this much; nobody copies more at once, so that all end together.
LEAST_BYTES, MOST_BYTES = 4 << 20, 8 << 20
Pair = tuple[Bytes, Bytes]
T = TypeVar("T")


def copy(pairs: Sequence[Pair]) -> None:
    """Copies each (target, source). Nothing may read or write them meanwhile."""
    total = sum([target.nbytes for target, _ in pairs])
    if count_threads(total) < 2:
        for target, source in pairs:
            target[:] = source
        return
    share(_cut(pairs), _copy_one, total)


def _copy_one(pair: Pair) -> bool:
    pair[0][:] = pair[1]
    return True


def count_threads(num_bytes: int) -> int:
    """Among how many threads work on so many bytes is worth sharing."""
    return min(num_threads(), num_bytes // LEAST_BYTES) if num_bytes >= 2 * LEAST_BYTES else 1


def share(items: Iterable[T], work: Callable[[T], bool], num_bytes: int) -> bool:
    """Whether `work` says yes to every item. Threads take one after the other; at the first no, all stop."""
    left = collections.deque(items)
    told = threading.Event()
    others = [_threads().submit(_take, left, work, told) for _ in range(count_threads(num_bytes) - 1)]
    _take(left, work, told)
    for other in others:
        if not other.cancel():  # one that has not begun has nothing left to do
            other.result()
    return not told.is_set()


def _take(left: collections.deque[T], work: Callable[[T], bool], told: threading.Event) -> None:
    while not told.is_set():
        try:
            item = left.popleft()
        except IndexError:
            return
        if not work(item):
            told.set()


def _cut(pairs: Sequence[Pair]) -> list[Pair]:
    return [
        (target[start : start + MOST_BYTES], source[start : start + MOST_BYTES])
        for target, source in pairs
        for start in range(0, target.nbytes, MOST_BYTES)
    ]


_making = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    with _making:
        return _make_threads()


@functools.cache
def _make_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, num_threads() - 1), thread_name_prefix="Thread-copy")
