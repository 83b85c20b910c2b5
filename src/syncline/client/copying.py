"""Copies of many bytes, shared among as many threads as this process may use."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from syncline.client.arrays import Bytes
from syncline.config import num_threads

#: A thread is worth waking for at least this much; nobody copies more at once, so that all end together.
LEAST_BYTES, MOST_BYTES = 4 << 20, 8 << 20
Pair = tuple[Bytes, Bytes]


def copy(pairs: Sequence[Pair]) -> None:
    """Copies each (target, source). Nothing may read or write them meanwhile."""
    total = sum([target.nbytes for target, _ in pairs])
    count = min(num_threads(), total // LEAST_BYTES) if total >= 2 * LEAST_BYTES else 1
    if count < 2:
        for target, source in pairs:
            target[:] = source
        return
    left = collections.deque(_cut(pairs))
    others = [_threads().submit(_work, left) for _ in range(count - 1)]
    _work(left)
    for other in others:
        if not other.cancel():  # one that has not begun has nothing left to do
            other.result()


def _work(left: collections.deque[Pair]) -> None:
    while True:
        try:
            target, source = left.popleft()
        except IndexError:
            return
        target[:] = source


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
