"""What the job's rules want of a worker: that training ends, or another learning rate."""

from __future__ import annotations

import threading

from syncline.core.metrics import Steer


class Steering:
    """Heard from the coordinator, in any thread; looked at by the script's own."""

    def __init__(self) -> None:
        self._steer = Steer()
        self._lock = threading.Lock()

    def hear(self, steer: Steer) -> None:
        """What was said before it, and comes later, changes nothing."""
        with self._lock:
            if steer.number > self._steer.number:
                self._steer = steer

    @property
    def stop(self) -> str:
        """Why training ends; empty: it goes on."""
        return self._steer.stop

    @property
    def factor(self) -> float:
        """On every learning rate."""
        return self._steer.factor
