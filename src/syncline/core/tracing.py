"""What members trace of their steps with `--trace`, and how all of it becomes one picture with one clock.

Pure. A *span* is one phase of a step: which, and from when to when by the clock of its member. A *knot* is a moment
at which a member knew how far its clock was from the coordinator's, and how wrong that can be: half a round trip. A
*life* is all that one incarnation of a member has traced. `chrome_events` makes of lives what Perfetto opens: one
process for each member, the phases of a step inside of the step, and for a pipeline a lane for each of its stages.
"""

from __future__ import annotations

import array
import bisect
import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from syncline.core.members import by_name
from syncline.stats import Event

PHASES: Final = ("compute", "stage", "wait", "pull", "apply", "data", "forward", "backward")
COMPUTE, STAGE, WAIT, PULL, APPLY, DATA, FORWARD, BACKWARD = range(len(PHASES))
#: Spans of a member that wait to be sent; the oldest are dropped.
MOST_UNSENT: Final = 50_000
#: Spans in one message.
MOST_SPANS: Final = 4_096
#: Of the knots in so long the best one counts.
KNOT_US: Final = 30_000_000
_MICRO: Final = 1e6
#: Lanes of one worker: a damaged span makes no more.
_MOST_STAGES: Final = 1_024


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """What a forward or backward of a pipeline is of."""

    stage: int  #: the process
    part: int  #: of the model; a process may have several
    number: int  #: of the micro-batch in its step


class PhaseSpan(msgspec.Struct, frozen=True, array_like=True):
    """One phase of a step. Times are microseconds of the member's own clock."""

    phase: int  #: its place in PHASES
    step: int  #: in rounds of the job, otherwise of the worker
    begin: int
    length: int
    worker: str = ""  #: of `apply` outside of rounds: whose push it is
    micro_batch: MicroBatch | None = None  #: of `forward` and `backward`


class Knot(msgspec.Struct, frozen=True, array_like=True):
    """At this moment of the member's clock the coordinator's was `offset` ahead; all in microseconds."""

    at: int
    offset: int
    error: int


class TracedBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a run's trace: what a member has sent at a time."""

    member: str
    role: str
    incarnation: int
    number: int  #: of the batch; one that is sent again has the same
    received: float  #: wall clock of the coordinator
    sent: int  #: clock of the member
    host: str = ""
    knot: Knot | None = None
    dropped: int = 0  #: spans of this life so far that were too many
    spans: list[PhaseSpan] = []


class SpanBuffer:
    """Spans of a member that are not sent yet. One thread adds, another one takes."""

    def __init__(self) -> None:
        self._spans: collections.deque[PhaseSpan] = collections.deque(maxlen=MOST_UNSENT)
        self._num_added = self._num_taken = 0

    def add(
        self,
        phase: int,
        step: int,
        begin: float,
        end: float,
        worker: str = "",
        micro_batch: MicroBatch | None = None,
    ) -> None:
        """`begin`, `end`: seconds. Spans that touch stay so: both ends are rounded alike."""
        first = round(begin * _MICRO)
        self._num_added += 1
        self._spans.append(PhaseSpan(phase, step, first, round(end * _MICRO) - first, worker, micro_batch))

    def take(self) -> list[PhaseSpan]:
        """The oldest ones, as many as fit in a message."""
        found: list[PhaseSpan] = []
        while self._spans and len(found) < MOST_SPANS:
            try:
                found.append(self._spans.popleft())
            except IndexError:
                break
        self._num_taken += len(found)
        return found

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def num_dropped(self) -> int:
        return max(0, self._num_added - self._num_taken - len(self._spans))


class Placed(NamedTuple):
    """A span by the coordinator's clock, in microseconds."""

    phase: int
    step: int
    begin: int
    end: int
    worker: str = ""
    micro_batch: MicroBatch | None = None


class TracedLife:
    """All that one incarnation of a member has traced."""

    def __init__(self, batch: TracedBatch) -> None:
        self.member, self.role, self.host, self.incarnation = batch.member, batch.role, batch.host, batch.incarnation
        self.num_dropped = 0
        self._numbers: set[int] = set()
        self._phase, self._step = array.array("b"), array.array("q")
        self._begin, self._length = array.array("q"), array.array("q")
        self._workers: dict[int, str] = {}  # by number of the span
        self._micro_batches: dict[int, MicroBatch] = {}  # likewise
        self._knots: list[Knot] = []
        self._latest_offset = batch.received * _MICRO - batch.sent  # too large by the way of a message

    def __len__(self) -> int:
        return len(self._begin)

    def add(self, batch: TracedBatch) -> None:
        """A batch that was sent again counts once."""
        if batch.number in self._numbers:
            return
        self._numbers.add(batch.number)
        self.num_dropped = max(self.num_dropped, batch.dropped)
        self._latest_offset = min(self._latest_offset, batch.received * _MICRO - batch.sent)
        if batch.knot is not None:
            self._knots.append(batch.knot)
        for span in batch.spans:
            if not (0 <= span.phase < len(PHASES) and span.length >= 0 and abs(span.begin) < 1 << 53):
                continue  # of another version, or damaged
            if (span.phase in (FORWARD, BACKWARD)) != (span.micro_batch is not None):
                continue
            if span.micro_batch is not None:
                if not 0 <= span.micro_batch.stage < _MOST_STAGES:
                    continue
                self._micro_batches[len(self._begin)] = span.micro_batch
            if span.worker:
                self._workers[len(self._begin)] = span.worker
            self._phase.append(span.phase)
            self._step.append(max(-1, min(span.step, 1 << 62)))
            self._begin.append(span.begin)
            self._length.append(min(span.length, 1 << 53))

    @property
    def error_us(self) -> int | None:
        """How wrong its times can be beside the coordinator's, in the middle of the life; None: not known."""
        errors = sorted(knot.error for knot in _best(self._knots))
        return errors[len(errors) // 2] if errors else None

    @property
    def begins_at(self) -> int | None:
        """The beginning of its first span, by the coordinator's clock; None without spans."""
        return self._moments()(min(self._begin)) if self._begin else None

    def aligned(self) -> list[Placed]:
        """Its spans by the coordinator's clock, oldest first."""
        moment = self._moments()
        columns = zip(self._phase, self._step, self._begin, self._length, strict=True)
        found = [
            Placed(
                phase,
                step,
                moment(begin),
                moment(begin + length),
                self._workers.get(number, ""),
                self._micro_batches.get(number),
            )
            for number, (phase, step, begin, length) in enumerate(columns)
        ]
        found.sort(key=lambda span: (span.begin, span.end))
        return found

    def _moments(self) -> Callable[[int], int]:
        """From the member's clock to the coordinator's.

        Between two knots the offset changes evenly: clocks that run at different speeds stay together, and no span
        comes to lie over its neighbour.
        """
        knots = _best(self._knots)
        ats, offsets = [knot.at for knot in knots], [knot.offset for knot in knots]

        def moment(at: int) -> int:
            if not knots:
                return round(at + self._latest_offset)
            place = bisect.bisect_left(ats, at)
            if place in (0, len(ats)):
                return at + offsets[min(place, len(ats) - 1)]
            before, after = ats[place - 1], ats[place]
            part = (at - before) / (after - before)
            return round(at + offsets[place - 1] + part * (offsets[place] - offsets[place - 1]))

        return moment


def _best(knots: Sequence[Knot]) -> list[Knot]:
    """The knot with the least error of each interval of time, by their clock."""
    found: dict[int, Knot] = {}
    for knot in knots:
        interval = knot.at // KNOT_US
        if interval not in found or knot.error < found[interval].error:
            found[interval] = knot
    return sorted(found.values(), key=lambda knot: knot.at)


def lives_of(batches: Iterable[TracedBatch]) -> list[TracedLife]:
    """Batches by member and incarnation: workers and servers, each by number."""
    found: dict[tuple[str, int], TracedLife] = {}
    for batch in batches:
        key = (batch.member, batch.incarnation)
        if key not in found:
            found[key] = TracedLife(batch)
        found[key].add(batch)
    return sorted(found.values(), key=lambda life: (life.role != "worker", by_name(life.member), life.incarnation))


def steps_of(spans: Sequence[Placed]) -> Iterator[tuple[int, int, int]]:
    """The steps of a worker as stretches of its spans: step, first span, span behind the last.

    A step lasts until its parameters are in place; with a window, where they come later, until it is committed.
    """
    begin, place = 0, 0
    while place < len(spans):
        if spans[place].phase != STAGE:
            place += 1
            continue
        step, end, place = spans[place].step, place + 1, place + 1
        while place < len(spans) and not (spans[place].phase == STAGE and spans[place].step != step):
            if spans[place].phase in (STAGE, WAIT, PULL) and spans[place].step == step:
                end = place + 1
            place += 1
        yield step, begin, end
        begin = place = end


def chrome_events(
    lives: Sequence[TracedLife], events: Sequence[Event] = (), *, first: int = 0, last: int | None = None
) -> Iterator[dict[str, Any]]:
    """The events of a trace in Chrome's format; times are microseconds since the first span. `first`, `last`: only
    these steps.
    """
    pids = {name: number for number, name in enumerate(dict.fromkeys(life.member for life in lives), 1)}
    zero = min((at for life in lives if (at := life.begins_at) is not None), default=0)
    num_lives: collections.Counter[str] = collections.Counter()
    num_lanes: collections.Counter[str] = collections.Counter()
    ends_at = zero
    for life in lives:
        pid = pids[life.member]
        num_lives[life.member] += 1
        number = num_lives[life.member]
        if number == 1:
            yield _told(pid, 0, "process_name", name=life.member)
            yield _told(pid, 0, "process_sort_index", sort_index=pid)
            yield _told(pid, 0, "process_labels", labels=_labels(life))
        lanes = _worker_lanes if life.role == "worker" else _server_lanes
        made = (
            (lane, event)
            for lane, step, event in lanes(life.aligned())
            if first <= step and (last is None or step <= last)
        )
        base, used = num_lanes[life.member], 0
        for lane, event in made:
            if lane >= used:
                again = f", life {number}" if number > 1 else ""
                for new in range(used, lane + 1):
                    yield _told(pid, base + new + 1, "thread_name", name=_row_name(life.role, new, again))
                used = lane + 1
            ends_at = max(ends_at, event["ts"] + event["dur"])
            yield {**event, "ts": event["ts"] - zero, "pid": pid, "tid": base + lane + 1}
        num_lanes[life.member] += used
    for mark in events:
        at = round(mark.at * _MICRO)
        if zero <= at <= ends_at + KNOT_US:
            told = {"step": mark.step, "text": mark.text}
            yield {"ph": "i", "s": "g", "name": mark.kind, "cat": "event", "ts": at - zero, "pid": 0, "tid": 0,
                   "args": told}  # fmt: skip


def _row_name(role: str, lane: int, again: str) -> str:
    """`again` names the life, if it is not the first."""
    if role != "worker":
        return f"rounds{again}" + (f" ({lane + 1})" if lane else "")
    return f"stage {lane - 1}{again}" if lane else f"steps{again}"


def _labels(life: TracedLife) -> str:
    error = life.error_us
    how = "clock not compared" if error is None else f"clock ±{error / 1e3:.3g} ms"
    return f"{life.host}, {how}" if life.host else how


def _told(pid: int, tid: int, kind: str, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": values}


def _whole(name: str, kind: str, begin: int, end: int, step: int, **more: str | int) -> dict[str, Any]:
    args = {"step": step, **more}
    return {"ph": "X", "name": name, "cat": kind, "ts": begin, "dur": end - begin, "args": args}


#: The lane of an event, the step that it is part of, and the event.
_Laid = tuple[int, int, dict[str, Any]]


def _worker_lanes(spans: Sequence[Placed]) -> Iterator[_Laid]:
    """One lane has each step with its phases in it. Computing belongs to the step that it is in. The stages of a
    pipeline have a lane each, with what they compute.
    """
    of_stages = [span for span in spans if span.micro_batch is not None]
    spans, done = [span for span in spans if span.micro_batch is None], 0
    for step, begin, end in steps_of(spans):
        part = sorted(spans[begin:end], key=lambda span: (span.begin, -span.end))
        yield 0, step, _whole(f"step {step}", "step", part[0].begin, max(span.end for span in part), step)
        for span in part:
            own = step if span.phase in (COMPUTE, DATA) else span.step
            yield 0, step, _whole(PHASES[span.phase], "phase", span.begin, span.end, own)
        done = end
    for span in spans[done:]:  # of a step that was not finished
        yield 0, span.step, _whole(PHASES[span.phase], "phase", span.begin, span.end, span.step)
    for span in of_stages:
        micro = span.micro_batch
        assert micro is not None
        told = _whole(
            f"{PHASES[span.phase]} {micro.number}", PHASES[span.phase], span.begin, span.end, span.step,
            micro_batch=micro.number, part=micro.part,
        )  # fmt: skip
        yield 1 + micro.stage, span.step, told


def _server_lanes(spans: Sequence[Placed]) -> Iterator[_Laid]:
    """Rounds that lie over one another have lanes of their own: each is in the first lane that is free."""
    free_at: list[int] = []
    for span in spans:
        lane = next((number for number, at in enumerate(free_at) if at <= span.begin), len(free_at))
        if lane == len(free_at):
            free_at.append(0)
        free_at[lane] = span.end
        more = {"worker": span.worker} if span.worker else {}
        yield lane, span.step, _whole(PHASES[span.phase], "phase", span.begin, span.end, span.step, **more)
