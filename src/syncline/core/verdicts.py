"""What rounds are made of, and what follows from an event in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")


class Commit(NamedTuple, Generic[T]):
    """One worker's commit, with whatever the caller needs to apply and answer it."""

    worker: str
    incarnation: int
    clock: int
    item: T


class Verdict(NamedTuple, Generic[T]):
    """What follows from an event: the rounds to apply now, in order, and why (not)."""

    kind: Literal["new", "open", "already applied", "late"]
    apply: tuple[tuple[Commit[T], ...], ...]
    why: Callable[[], str]

    @property
    def reason(self) -> str:
        """In words; put together when somebody asks, since nearly nobody does."""
        return self.why()
