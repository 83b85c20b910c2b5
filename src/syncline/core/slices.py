"""Slice state: what travels together when a slice is saved, replicated or moved, apart from its bytes."""

from __future__ import annotations

import dataclasses
from typing import Literal

from syncline.errors import ProtocolError

Identity = tuple[str, int]  # name, incarnation


@dataclasses.dataclass(slots=True)
class SliceState:
    """Version and clocks of one slice. The vector clock is the table of what has been applied here."""

    version: int = 0
    clocks: dict[Identity, int] = dataclasses.field(default_factory=dict)
    seen: dict[str, int] = dataclasses.field(default_factory=dict)  # version that each worker pulled last
    pins: int = 0
    writing: bool = False

    def admit(self, worker: Identity, clock: int) -> Literal["new", "already applied"]:
        """Whether a commit is still to be applied here; a gap is an error of ours, never skipped over."""
        known = self.clocks.get(worker, 0)
        if clock <= known:
            return "already applied"
        if clock != known + 1:
            raise ProtocolError(f"{worker[0]} commits clock {clock} on a slice that is at {known}")
        return "new"

    def applied(self, workers: list[tuple[Identity, int]], changed: bool) -> None:
        """A round is in: clocks advance on every slice, the version only where something changed."""
        for worker, clock in workers:
            self.clocks[worker] = clock
        if changed:
            self.version += 1

    def staleness(self, worker: str) -> int:
        """Updates applied since this worker pulled: version at apply minus version at pull."""
        return self.version - self.seen.get(worker, self.version)

    def is_still(self, version: int) -> bool:
        """Whether an optimistic copy of this version, taken before now, cannot be torn."""
        return self.version == version and not self.writing
