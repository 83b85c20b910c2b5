"""Schedules: the order of actions of each worker, as torch.distributed.pipelining (2.13) runs them.

Names are torch's. An action is a computation (F, B), a transfer that is begun (SEND_F, RECV_F, SEND_B, RECV_B), or a
wait for transfers (WAIT). Stage k of an interleaved schedule lies on worker k % num_workers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from syncline.core.stages import SCHEDULES
from syncline.errors import ConfigError

#: Stages on one worker, where a schedule has several.
INTERLEAVED_STAGES = 2


class Transfer(NamedTuple):
    """What crosses the cut between two neighbouring stages: F downwards, B (gradients) upwards."""

    kind: str  # F, B
    cut: int  # between the stages `cut` and `cut + 1`
    micro_batch: int


class Action(NamedTuple):
    """One step of a worker."""

    kind: str  # F, B, SEND_F, RECV_F, SEND_B, RECV_B, WAIT
    stage: int = -1
    micro_batch: int = -1
    waits: tuple[Transfer, ...] = ()

    @property
    def transfer(self) -> Transfer:
        """The transfer that a SEND or RECV begins."""
        way, _, kind = self.kind.partition("_")
        above = self.stage if (way, kind) in (("SEND", "F"), ("RECV", "B")) else self.stage - 1
        return Transfer(kind, above, self.micro_batch)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the order of actions depends on: nothing that is measured."""

    schedule: str
    num_workers: int  #: of one pipeline
    num_micro_batches: int
    stages_per_worker: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_workers * self.stages_per_worker

    def worker_of(self, stage: int) -> int:
        return stage % self.num_workers


def check_schedule(name: str) -> str:
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r}: must be one of {', '.join(SCHEDULES)}")
    return name


def why_not(shape: Shape) -> str:
    """Why torch refuses this number of micro-batches; empty if it does not."""
    micro_batches, workers = shape.num_micro_batches, shape.num_workers
    if shape.schedule == "1f1b" and micro_batches < workers:
        return f"1f1b needs as many micro-batches as stages: {micro_batches} are fewer than {workers}"
    if shape.schedule == "interleaved" and micro_batches % (rounds := max(1, micro_batches // workers)):
        return (
            f"interleaved with {workers} workers makes {rounds} rounds of {micro_batches} micro-batches, and "
            f"{micro_batches} cannot be divided by {rounds}"
        )
    return ""


def check_micro_batches(shape: Shape, batch: int) -> None:
    """Whether a batch of so many samples can go through this pipeline; else a ConfigError."""
    micro_batches = shape.num_micro_batches
    if micro_batches < 1:
        raise ConfigError(f"{micro_batches} micro-batches: must be 1 or more, or auto")
    if batch < micro_batches:
        raise ConfigError(
            f"a batch of {batch} cannot be split into {micro_batches} micro-batches; use a larger batch, or "
            f"--micro-batches {batch} at most"
        )
    if batch % micro_batches:
        near = [number for number in divisors(batch) if number <= micro_batches][-1]
        raise ConfigError(
            f"a batch of {batch} cannot be split into {micro_batches} equal micro-batches; use --micro-batches "
            f"{near}, or a batch of {-(-batch // micro_batches) * micro_batches}"
        )
    if why := why_not(shape):
        raise ConfigError(f"{why}; use another --micro-batches, or --schedule gpipe")


def divisors(number: int) -> list[int]:
    """The smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


@functools.lru_cache(maxsize=256)
def actions(shape: Shape) -> tuple[tuple[Action, ...], ...]:
    """What each worker of a pipeline does in one step, in its order."""
    if shape.schedule == "interleaved":
        return _interleaved(shape)
    make = {"gpipe": _gpipe, "1f1b": _1f1b}[shape.schedule]
    return tuple(tuple(make(stage, shape)) for stage in range(shape.num_workers))


def most_in_flight(shape: Shape) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each worker, how many micro-batches each of its stages keeps at once; where the peaks of its stages do not
    come together, several combinations, none within another.
    """
    found = []
    for worker, program in enumerate(actions(shape)):
        own = range(worker, shape.num_stages, shape.num_workers)
        held, seen = dict.fromkeys(own, 0), set()
        for action in program:
            if action.kind in ("F", "B"):
                held[action.stage] += 1 if action.kind == "F" else -1
                seen.add(tuple(held.values()))
        found.append(tuple(sorted(one for one in seen if not any(_within(one, two) for two in seen if two != one))))
    return tuple(found)


def _within(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, two, strict=True))


def _wait(*begun: Action | None) -> Iterator[Action]:
    """The actions that begin these transfers, together, then the wait for all of them."""
    known = [action for action in begun if action is not None]
    yield from known
    if known:
        yield Action("WAIT", waits=tuple(action.transfer for action in known))


def _ends(stage: int, shape: Shape) -> tuple[bool, bool]:
    return stage == 0, stage == shape.num_stages - 1


def _gpipe(stage: int, shape: Shape) -> Iterator[Action]:
    is_first, is_last = _ends(stage, shape)
    for kind, is_source, is_sink in (("F", is_first, is_last), ("B", is_last, is_first)):
        sent = []
        for number in range(shape.num_micro_batches):
            if not is_source:
                yield from _wait(Action(f"RECV_{kind}", stage, number))
            yield Action(kind, stage, number)
            if not is_sink:
                sent.append(Action(f"SEND_{kind}", stage, number))
                yield sent[-1]
        if sent:
            yield Action("WAIT", waits=tuple(action.transfer for action in sent))


def _1f1b(stage: int, shape: Shape) -> Iterator[Action]:
    is_first, is_last = _ends(stage, shape)
    total = shape.num_micro_batches

    def transfer(kind: str, number: int) -> Action | None:
        is_outside = is_first if kind in ("RECV_F", "SEND_B") else is_last
        return None if is_outside else Action(kind, stage, number)

    warmup = min(total, shape.num_stages - stage)
    sent: Action | None = None  # not waited for yet
    for number in range(warmup):
        yield from _wait(transfer("RECV_F", number))
        yield Action("F", stage, number)
        if sent is not None:
            yield Action("WAIT", waits=(sent.transfer,))
            sent = None
        if number != warmup - 1 and (sent := transfer("SEND_F", number)) is not None:
            yield sent
    forwards, backwards, unsent = warmup, 0, transfer("SEND_F", warmup - 1)
    while True:
        yield from _wait(unsent, transfer("RECV_B", backwards))
        yield Action("B", stage, backwards)
        back = transfer("SEND_B", backwards)
        backwards += 1
        if forwards == total:
            break
        yield from _wait(back, transfer("RECV_F", forwards))
        yield Action("F", stage, forwards)
        unsent = transfer("SEND_F", forwards)
        forwards += 1
    if (sent := back) is not None:
        yield sent
    while backwards < total:
        yield from _wait(transfer("RECV_B", backwards))
        yield Action("B", stage, backwards)
        if sent is not None:
            yield Action("WAIT", waits=(sent.transfer,))
        if (sent := transfer("SEND_B", backwards)) is not None:
            yield sent
        backwards += 1
    if sent is not None:
        yield Action("WAIT", waits=(sent.transfer,))


def _interleaved(shape: Shape) -> tuple[tuple[Action, ...], ...]:
    """The computations of every worker, then the transfers among them, as torch lowers such a schedule.

    There workers take turns, and so a receive gets its place. After the last backward of a stage a worker lets two
    turns pass: torch divides the gradients in one, and would release parameters in the other.
    """
    left = [list(_interleaved_computations(worker, shape)) for worker in range(shape.num_workers)]
    passing = [0] * len(left)
    made: list[list[Action]] = [[] for _ in left]
    ready: list[set[tuple[str, int, int]]] = [set() for _ in left]  # what each worker has computed or receives
    last = shape.num_stages - 1
    while any(left):
        for worker, program in enumerate(left):
            if not program:
                continue
            if passing[worker]:
                passing[worker] -= 1
                continue
            action = program[0]
            kind, stage, number = action.kind, action.stage, action.micro_batch
            is_source = stage == (0 if kind == "F" else last)
            before = (kind, stage - 1 if kind == "F" else stage + 1, number)
            receives = (f"RECV_{kind}", stage, number)
            if not is_source and receives not in ready[worker] and before not in ready[worker]:
                continue
            program.pop(0)
            if kind == "B" and number == shape.num_micro_batches - 1:
                passing[worker] = 2
            if receives in ready[worker]:
                made[worker].append(Action("WAIT", waits=(Action(*receives).transfer,)))
            made[worker].append(action)
            ready[worker].add((kind, stage, number))
            follower = stage + 1 if kind == "F" else stage - 1
            if 0 <= follower <= last and (other := shape.worker_of(follower)) != worker:
                made[worker].append(Action(f"SEND_{kind}", stage, number))
                made[other].append(Action(f"RECV_{kind}", follower, number))
                ready[other].add((f"RECV_{kind}", follower, number))
    for program in made:
        sent = tuple(action.transfer for action in program if action.kind.startswith("SEND"))
        if sent:
            program.append(Action("WAIT", waits=sent))
    return tuple(tuple(program) for program in made)


def _interleaved_computations(worker: int, shape: Shape) -> Iterator[Action]:
    workers, own, micro_batches = shape.num_workers, shape.stages_per_worker, shape.num_micro_batches
    in_round = micro_batches // max(1, micro_batches // workers)
    total = own * micro_batches
    warmup = min((own - 1) * in_round + 2 * (workers - 1 - worker), total)
    counts: dict[tuple[str, int], int] = {}

    def next_action(kind: str, step: int) -> Action:
        place = step // in_round % own
        stage = (place if kind == "F" else own - 1 - place) * workers + worker
        counts[kind, stage] = counts.get((kind, stage), -1) + 1
        return Action(kind, stage, counts[kind, stage])

    for step in range(warmup):
        yield next_action("F", step)
    for step in range(warmup, total):
        yield next_action("F", step)
        yield next_action("B", step - warmup)
    for step in range(total - warmup, total):
        yield next_action("B", step)
