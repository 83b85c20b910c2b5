"""What every exchange promises: how gradients become new parameters, whatever carries them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from syncline.core.layout import Layout, Ranges, Segment, Slice
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rule import Option
from syncline.core.wire.control import Passed
from syncline.core.wire.traffic import StateEntry
from syncline.errors import ConfigError
from syncline.stats import PushBytes, WireStats
from syncline.worker.arrays import Bytes
from syncline.worker.copies import KeptArrays
from syncline.worker.sinks import ArraySink, Sink
from syncline.worker.times import StepClock


def left(name: str) -> ConfigError:
    """This worker is asked for something after its end."""
    return ConfigError(
        f"{name} has left its job: job.close() was called, `with job:` has ended, or syncline.Stopped was raised; "
        "step, push and pull before that"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Push:
    """One commit: which parameters have a gradient in the arena, and what the round needs to know."""

    pushed: Ranges
    weight: float = 1.0
    skip: bool = False  #: an overflow: the clock advances, the round changes nothing
    clip_norm: float | None = None
    overrides: Sequence[tuple[int, int, Mapping[str, Option]]] = ()
    as_staged: frozenset[int] = frozenset()  #: slices that were staged early, and are what they were then
    finite: Ranges = ()  #: of those pushed, which were found to be so while they were copied; others are looked at


class Ticket(Protocol):
    """A push under way."""

    def done(self) -> bool:
        """Whether the answer is here."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Returns when the push is applied (and what was to be pulled is there). Raises WaitTimeout."""

    def wait_for(self, slices: Collection[int]) -> None:
        """Returns when these slices are in the sink; others may still be under way."""


class Exchange(Protocol):
    """The verbs of an exchange. One thread uses it at a time."""

    layout: Layout
    clock: int
    times: StepClock
    checks_finite: bool  #: whether pushes that are not finite are refused
    is_arena_lent: (
        bool  #: whether others than a segment's carrier may write arenas: a script, which has them from `kv`
    )
    carried: set[int]  #: segments that have a carrier

    @property
    def slot(self) -> int:
        """Which of its arenas the next commit takes: with a window there are several."""

    def make_room(self) -> None:
        """Waits until the next commit's arena is free to be written."""

    def mapped(self) -> list[Bytes]:
        """The servers' parameters, as far as they are mapped into this process."""

    def add(self, segments: Sequence[Segment], replica_sets: Sequence[ReplicaSet]) -> None:
        """The job's layout has grown; these servers have its slices."""

    def upload(self, segment: Segment, values: Bytes, *, again: bool = False) -> None:
        """The chief's first values. `again`: also after updates, by the only worker of a job."""

    def arena(self, segment: int) -> Bytes:
        """Where the gradients of the next commit are written; free to be written when this returns."""

    @property
    def early_bytes(self) -> float:
        """So many bytes are worth staging before the commit: any, where gradients travel over a socket; some, where
        servers add them up in shared memory; else no number of them (inf)."""

    def stage(self, slices: Sequence[Slice]) -> None:
        """These slices of the arena are filled: they may travel and be added up now. They count at the commit, as
        they are then: what a push does not vouch for by that goes again (`Push.as_staged`)."""

    def commit(self, push: Push, sink: Sink | None) -> Ticket:
        """The arena counts from now on; new parameters go into the sink, if there is one."""

    def before_commit(self, action: Callable[[], None]) -> Callable[[], None]:
        """Runs the action before every commit: the servers' memory may be written after it. Returns what ends it."""

    def prefer(self, slices: Sequence[int]) -> None:
        """The order in which this worker needs its slices, by their ids: they are applied in it."""

    def pull(self, slices: Sequence[Slice], sink: Sink, min_version: int | None) -> list[int]:
        """Parameters into the sink; their versions."""

    def keep(self, sink: Sink, slices: Sequence[Slice], arrays: KeptArrays) -> None:
        """What a sink has of these slices lies in the caller's arrays: a copy for as long as they live."""

    def overwrites(self, sink: ArraySink) -> None:
        """This sink lies in the caller's own arrays, whatever they have held so far."""

    @property
    def num_updates(self) -> int:
        """That parameters have had, by what this worker knows, and with its own that are under way."""

    def rest(self, *, is_pause: bool = False, if_active: bool = False, if_awaited: bool = False) -> None:
        """Takes part in no more rounds of this loop; `is_pause`: until its next commit. `if_active`: unless it rests
        already; `if_awaited`: and only when a round waits for it."""

    def step_aside(self) -> int:
        """No round waits for this worker until its next commit; the phase it was in."""

    def pass_barrier(self, passed: Passed) -> None:
        """Behind a barrier everyone is in the same, new phase."""

    def read_state(self, slices: Sequence[Slice], key: str = "") -> list[tuple[StateEntry, Bytes]]:
        """What the rules remember about these slices; `key`: only this of it."""

    def write_state(self, slices: Sequence[Slice], entries: Sequence[tuple[StateEntry, Bytes]]) -> None:
        """Gives the rules their state on these slices."""

    def stats(self) -> WireStats:
        """What went over the wire so far."""

    @property
    def pushed_bytes(self) -> PushBytes:
        """What its pushes took so far."""

    def leave(self) -> None:
        """No round waits for this worker any more."""
