"""The best model: every validation is saved, and the pointer `best` says which save has the best reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from syncline.core.validations import Validation

if TYPE_CHECKING:
    from syncline.roles.coordinator.coordinator import Coordinator


class Bests:
    """Under the coordinator's lock."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator

    @property
    def wants_save(self) -> bool:
        return False

    def save(self, release: Callable[[], None]) -> None:
        """Under the lock: all workers stand still for a validation; `release`: once the cut is made."""

    def candidates(self) -> list[str]:
        return []

    def validated(self, over: Validation) -> None:
        """Under the lock: these are its readings."""
