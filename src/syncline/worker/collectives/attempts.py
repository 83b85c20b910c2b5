"""Which calls may meet: those of scripts that began together, and have seen the same calls fail since.

A worker that starts again begins its script at the top, while the others are somewhere in the middle. Their calls
look alike, but a result of both would be wrong. So every description carries the history of its sender: the attempt,
and for every other member how many of their common calls failed here. Both are constant while calls succeed.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.core.wire.collectives import STRANGER


class Attempt:
    """Of one worker. Everything in it is changed and read under the lock of all ways."""

    def __init__(self, me: int) -> None:
        self._me = me
        self.number = 0  # of restarts together with the others
        self.version = 0  # changes whenever what is described changes
        self._known: frozenset[int] | None = None  # incarnations that were there at the first call; None: none made
        self._failures: dict[int, int] = {}  # by incarnation: of calls with this one

    def failures(self, group: Sequence[int]) -> tuple[int, ...]:
        """What a description says of every member; empty, if there is nothing to say.

        The own entry is the largest of the others: where all have seen the same, all say it in the same bytes.
        """
        counts = {one: self._count(one) for one in group if one != self._me}
        if not any(counts.values()):
            return ()
        counts[self._me] = max(0, *counts.values())
        return tuple(counts[one] for one in group)

    def is_stranger(self, incarnation: int) -> bool:
        """Whether this worker began its script after the own one had made its first call."""
        return self._known is not None and incarnation not in self._known

    def _count(self, incarnation: int) -> int:
        return STRANGER if self.is_stranger(incarnation) else self._failures.get(incarnation, 0)

    def end(self, there: frozenset[int]) -> None:
        """A call has ended, well or not; `there`: who was there when it began. The first one decides who is known."""
        if self._known is None:
            self._known = there | {self._me}

    def fail(self, group: Sequence[int], count: int = 1) -> None:
        """Calls of this group have failed here, or will never be made here."""
        if count > 0 and self._me in group:
            for one in group:
                self._failures[one] = self._failures.get(one, 0) + count
            self.version += 1

    def restart(self, number: int, group: Sequence[int]) -> None:
        """All of this group begin again together; `number`: the attempt that they have agreed on."""
        self.number = number
        self._known = frozenset(group) | (self._known or frozenset())
        self._failures.clear()
        self.version += 1
