"""What the job's rules want of a worker: that training ends, or another learning rate."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from syncline.core.metrics import Steer
from syncline.core.rule import Option


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


def with_factor(
    changed: Mapping[str, Option], registered: Mapping[str, Option], factor: float
) -> Mapping[str, Option]:
    """Hyperparameters that differ from the registered ones, when learning rates are multiplied by a factor."""
    rate = changed.get("lr", registered.get("lr"))
    if factor == 1.0 or not isinstance(rate, int | float):
        return changed
    return {**changed, "lr": rate * factor}
