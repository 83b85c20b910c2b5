"""A round's turn in a circle: its buckets are added up one after the other, in one order at all servers.

First by the forecast of the round, bucket by bucket as this server's worker stages them, whatever the round turns out
to be: so all make the same calls. Then, where the forecast has not held, again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from syncline.core.forecast import Outcome
from syncline.server.early import Counted, Early
from syncline.server.sums import Bucket, Pending, Reduce, RoundSums, Sums, counted_in, equal_weight
from syncline.server.work import RoundWork


class Circling:
    """One round's, in the thread of its circle."""

    def __init__(self, sums: Sums, forecast: Counted, own_worker: str, reduce: Reduce) -> None:
        """`forecast`: its commits, as they are expected; none: nothing is added up before it is whole."""
        self._sums, self._own_worker, self._reduce = sums, own_worker, reduce
        self._forecast, self._pending = forecast, list[Pending]()
        self._buckets = sums.buckets(forecast)

    @property
    def num_begun(self) -> int:
        """Buckets, so far."""
        return len(self._pending)

    def go_on(self, staged: Early) -> None:
        """With what this server's worker has staged: as many buckets as are whole by that, the next one first."""
        own = self._own(self._forecast)

        def is_ready(bucket: Bucket) -> bool:
            if not all(staged.has_all(own, number) for number in bucket.awaits(own)):
                return False
            staged.with_arrays(own)  # after it: it may have been staged in this moment
            return True

        with contextlib.suppress(KeyError):  # that worker has left: the round will be another one
            self._enter(own, self._forecast, is_ready)

    def _own(self, commits: Counted) -> Counted:
        return [commit for commit in commits if commit.worker == self._own_worker]

    def _enter(self, own: Counted, counted: Counted, is_ready: Callable[[Bucket], bool]) -> None:
        equal = equal_weight(counted)
        for bucket in self._buckets[len(self._pending) :]:
            if not is_ready(bucket):
                break
            bucket.lay(own, equal)
            self._pending.append(self._reduce(bucket.flat))

    def make(self, work: RoundWork, outcome: Outcome) -> RoundSums:
        """The round is whole."""
        counted = counted_in(work)
        if outcome.was_forecast:
            self._enter(self._own(counted) if outcome.held else (), counted, lambda bucket: True)
        for under_way in self._pending:
            under_way.wait()
        found = RoundSums()
        if outcome.was_forecast and outcome.held:
            again = [bucket for bucket in self._buckets if any(map(outcome.is_anew, bucket.numbers))]
            self._take([bucket for bucket in self._buckets if bucket not in again], work, counted, found)
        else:
            again = self._sums.buckets(counted)
        self._add_up(again, counted)
        self._take(again, work, counted, found)
        return found

    def _add_up(self, buckets: Sequence[Bucket], counted: Counted) -> None:
        own, equal, pending = self._own(counted), equal_weight(counted), list[Pending]()
        for bucket in buckets:
            bucket.lay(own, equal)
            pending.append(self._reduce(bucket.flat))
        for under_way in pending:
            under_way.wait()

    def _take(self, buckets: Sequence[Bucket], work: RoundWork, counted: Counted, found: RoundSums) -> None:
        for bucket in buckets:
            bucket.read(counted, work.weight, equal_weight(counted), found)
