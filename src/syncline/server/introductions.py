"""torch.distributed's store, over our own connections: what a server says, all others of its circle hear.

So nothing listens for it, and whoever speaks has proved the job's token.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from syncline.errors import ProtocolError

#: gloo tells the others of a circle where it listens, nccl a name for it: each once, some hundred bytes.
MOST_BYTES, MOST_KEYS = 1 << 16, 1 << 12


class Heard:
    """What servers have said of themselves, by generation; others may have begun one before us."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self._values: dict[int, dict[str, bytes]] = {}
        self._generation = 0

    def begin(self, generation: int) -> None:
        """What was said for those before is nothing any more; whoever waits for it hears so."""
        with self.change:
            self._generation = generation
            self._values = {g: values for g, values in self._values.items() if g >= generation}
            self.change.notify_all()

    def hear(self, generation: int, key: str, value: bytes) -> None:
        if len(value) > MOST_BYTES or len(key) > MOST_BYTES:
            raise ProtocolError(f"an introduction of {len(key)} and {len(value)} bytes; at most {MOST_BYTES}")
        with self.change:
            if generation < self._generation:
                return
            values = self._values.setdefault(generation, {})
            if len(values) >= MOST_KEYS:
                raise ProtocolError(f"more than {MOST_KEYS} introductions")
            values[key] = value
            self.change.notify_all()

    def of(self, generation: int) -> dict[str, bytes]:
        """Under `change`."""
        if generation < self._generation:
            raise RuntimeError(f"generation {generation} is over")
        return self._values.get(generation, {})


class Introductions(Store):
    """The store of one circle. torch sets keys and waits for those of others; it asks for nothing else of it."""

    def __init__(
        self, generation: int, heard: Heard, tell: Callable[[str, bytes], None], timeout_seconds: float
    ) -> None:
        super().__init__()
        self._generation, self._heard, self._tell, self._seconds = generation, heard, tell, timeout_seconds

    def set(self, key: str, value: str | bytes) -> None:
        said = value.encode() if isinstance(value, str) else bytes(value)
        self._heard.hear(self._generation, key, said)
        self._tell(key, said)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._heard.change:
            return self._heard.of(self._generation)[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """As long as the generation lasts, whatever torch says: others come when their round is whole."""
        with self._heard.change:
            if not self._heard.change.wait_for(lambda: self._has(keys), self._seconds):
                raise RuntimeError(f"nothing was heard of {', '.join(keys)} within {self._seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        with self._heard.change:
            return self._has(keys)

    def _has(self, keys: list[str]) -> bool:
        known = self._heard.of(self._generation)
        return all(key in known for key in keys)

    def num_keys(self) -> int:
        with self._heard.change:
            return len(self._heard.of(self._generation))
