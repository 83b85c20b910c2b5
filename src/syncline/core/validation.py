"""Validations: when all workers meet for one, who measures which shard, and the results.

Pure. The first worker for which a validation is due calls it. All workers come, read the same parameters, and share
the sets. A validation shard with a result is done; shards of dead workers are to do again. `ValidationState` survives
the coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from syncline.core.slice_state import Identity
from syncline.core.wire.validation import WEIGHTS, AskValidationShard, Called, GivenValidationShard
from syncline.errors import ConfigError, ProtocolError

MOST_SETS = 100


class ValidationShard(msgspec.Struct, frozen=True, array_like=True):
    """The samples that one incarnation of a worker measures."""

    worker: str
    incarnation: int
    begin: int
    end: int

    @property
    def owner(self) -> Identity:
        return (self.worker, self.incarnation)


class Run(msgspec.Struct):
    """One candidate over one set."""

    set: str
    candidate: str
    num_samples: int = -1  # not known yet
    batch: int = 1
    todo: list[tuple[int, int]] = []
    shards: dict[int, ValidationShard] = msgspec.field(default_factory=dict, name="stints")  # as journals have it
    sums: dict[str, float] = {}
    errors: dict[str, float] = {}  # sums of rounding errors

    @property
    def is_finished(self) -> bool:
        return self.num_samples >= 0 and not self.todo and not self.shards

    def open(self, num_samples: int, batch: int) -> None:
        if self.num_samples < 0:
            if num_samples < 1 or batch < 1:
                raise ProtocolError(f"a validation over {num_samples} samples in batches of {batch}")
            self.num_samples, self.batch, self.todo = num_samples, batch, [(0, num_samples)]
        elif (num_samples, batch) != (self.num_samples, self.batch):
            raise ConfigError(
                f"job.validate: there are {num_samples} samples in batches of {batch} here, {self.num_samples} in "
                f"batches of {self.batch} at others: all workers must validate on the same data"
            )

    def take(self, number: int, owner: Identity, num_inside: int) -> ValidationShard | None:
        """The next validation shard: large ones first, so that all workers finish at about the same time."""
        known = next(
            (validation_shard for validation_shard in self.shards.values() if validation_shard.owner == owner), None
        )
        if known is not None or not self.todo:
            return None
        begin, end = self.todo.pop(0)
        left = sum(last - first for first, last in self.todo) + end - begin
        size = max(1, math.ceil(left / (2 * max(1, num_inside)) / self.batch)) * self.batch
        if begin + size < end:
            self.todo.insert(0, (begin + size, end))
        validation_shard = self.shards[number] = ValidationShard(*owner, begin, min(end, begin + size))
        return validation_shard

    def finish(
        self, number: int, owner: Identity, sums: Mapping[str, float], errors: Mapping[str, float] = {}
    ) -> bool:
        """Its owner has finished a validation shard: it counts, once."""
        validation_shard = self.shards.get(number)
        if validation_shard is None or validation_shard.owner != owner:
            return False
        if self.sums and set(self.sums) != set(sums):
            odd = ", ".join(sorted(set(self.sums) ^ set(sums)))
            raise ConfigError(
                f"job.validate: some batches have {odd}, others have not: fn must always return the same metrics"
            )
        del self.shards[number]
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in sums.items()}
        self.errors = {name: self.errors.get(name, 0.0) + errors.get(name, 0.0) for name in sums}
        return True

    def out(self, owner: Identity) -> bool:
        """An incarnation is over. Returns whether it had a validation shard, which is to do again."""
        mine = [number for number, validation_shard in self.shards.items() if validation_shard.owner == owner]
        self.todo = sorted([*self.todo, *((self.shards[n].begin, self.shards[n].end) for n in mine)])
        for number in mine:
            del self.shards[number]
        return bool(mine)

    def values(self) -> dict[str, float]:
        """The means, prefixed with the set's name if it has one."""
        return self._means(self.sums)

    def mean_errors(self) -> dict[str, float]:
        """The rounding errors of these, due to the types of the measured numbers."""
        return self._means(self.errors)

    def _means(self, sums: Mapping[str, float]) -> dict[str, float]:
        prefix = f"{self.set}/" if self.set else ""
        return {f"{prefix}{name}": total / self.num_samples for name, total in sums.items()}


class Validation(msgspec.Struct):
    """A running validation: all workers have come."""

    turn: int
    step: int
    runs: list[Run]
    inside: dict[str, int]  # workers with these parameters -> incarnation
    absent: list[str] = []  # those that have not pulled them yet
    folder: str = ""  # of the mean of the last checkpoints
    own: dict[str, dict[str, float]] = {}  # with local steps: readings of workers' own models
    awaited: list[str] = []  # workers that must still report them

    def run(self, name: str, candidate: str) -> Run:
        found = next((run for run in self.runs if (run.set, run.candidate) == (name, candidate)), None)
        if found is None:
            raise ProtocolError(f"validation {self.turn} has no set {name!r} for {candidate!r}")
        return found

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(run.set for run in self.runs))

    @property
    def candidates(self) -> list[str]:
        return list(dict.fromkeys(run.candidate for run in self.runs))

    @property
    def has_more(self) -> bool:
        return any(run.todo or run.num_samples < 0 for run in self.runs)

    @property
    def is_finished(self) -> bool:
        return all(run.is_finished for run in self.runs) and not self.awaited

    @property
    def is_lost(self) -> bool:
        """Whether no worker is left to finish it."""
        return not self.inside and not self.is_finished

    def is_in(self, owner: Identity) -> bool:
        return self.inside.get(owner[0]) == owner[1]

    def out(self, owner: Identity) -> bool:
        """This incarnation takes part no more."""
        if not self.is_in(owner):
            return False
        del self.inside[owner[0]]
        self.absent = [name for name in self.absent if name != owner[0]]
        self.awaited = [name for name in self.awaited if name != owner[0]]
        for run in self.runs:
            run.out(owner)
        return True

    def values(self, candidate: str = WEIGHTS) -> dict[str, float]:
        found: dict[str, float] = {}
        for run in self.runs:
            if run.candidate == candidate:
                found.update(run.values())
        return found

    def errors(self) -> dict[str, float]:
        """The rounding errors of the values of the job's parameters."""
        found: dict[str, float] = {}
        for run in self.runs:
            if run.candidate == WEIGHTS:
                found.update(run.mean_errors())
        return found

    @property
    def told(self) -> str:
        """accuracy 0.91, loss 0.3; average: accuracy 0.92, loss 0.29."""
        found = []
        for candidate in self.candidates:
            values = ", ".join(f"{name} {value:.6g}" for name, value in sorted(self.values(candidate).items()))
            found.append(values if candidate == WEIGHTS else f"{candidate}: {values}")
        for worker, own in sorted(self.own.items()):
            found.append(f"{worker}: " + ", ".join(f"{name} {value:.6g}" for name, value in sorted(own.items())))
        return "; ".join(found)

    def all_values(self) -> dict[str, float]:
        """Of all candidates; other candidates than the job's parameters as `CANDIDATE:METRIC`."""
        found = self.values()
        for candidate in self.candidates:
            if candidate != WEIGHTS:
                found |= {f"{candidate}:{name}": value for name, value in self.values(candidate).items()}
        for worker, own in self.own.items():
            found |= {f"{worker}:{name}": value for name, value in own.items()}
        return found


def of_candidates(values: Mapping[str, float], metric: str) -> dict[str, float]:
    """A metric's value by candidate, the job's parameters first."""
    found = {WEIGHTS: values[metric]} if metric in values else {}
    for name, value in values.items():
        candidate, colon, rest = name.partition(":")
        if colon and rest == metric:
            found[candidate] = value
    return found


class BestSoFar(msgspec.Struct, frozen=True):
    """The checkpoint with the best value."""

    metric: str
    value: float
    checkpoint: str
    step: int = 0
    candidate: str = WEIGHTS
    root: str = ""

    @property
    def told(self) -> str:
        """accuracy 0.912 at step 480: DIR/000012-step-480."""
        what = "" if self.candidate == WEIGHTS else f" ({self.candidate})"
        return f"{self.metric} {self.value:.6g}{what} at step {self.step}: {self.root}/{self.checkpoint}"


class ValidationState(msgspec.Struct):
    """All validations of a job; survives the coordinator."""

    turn: int = 0  # of the last called one
    called: int = 0  # the same, while not all have come
    step: int = 0  # announced with the call
    due: list[str] = []  # its sets
    next_shard: int = msgspec.field(default=1, name="next_stint")  # as journals have it
    steps: dict[str, int] = {}  # set -> the step of its last validation
    epochs: dict[str, int] = {}  # set -> the epoch of its last validation
    floor: int = 0  # the step of the checkpoint that the job started from
    metrics: list[str] = []  # metrics that come from validations
    now: Validation | None = None
    best: BestSoFar | None = None
    mean: str = ""  # the checkpoint with the mean of the last ones
    num_given_up: int = 0


class Validating:
    """Decides; what it knows is in the state."""

    def __init__(self, state: ValidationState) -> None:
        self.state = state

    def come(self, step: int, due: Mapping[str, int], epoch: int = -1) -> Called:
        """A worker finds these sets due. Returns the current call."""
        state = self.state
        if len(state.steps.keys() | due.keys()) > MOST_SETS:
            raise ConfigError(f"job.validate: there are more than {MOST_SETS} sets")
        wanted = [name for name, at in due.items() if state.steps.get(name, state.floor) < at]
        if epoch >= 0:
            wanted = [name for name in wanted if state.epochs.get(name, -1) < epoch]
            state.epochs.update(dict.fromkeys(wanted, epoch))
        if wanted and not state.called:
            state.turn += 1
            state.called, state.step, state.due = state.turn, step, []
        if wanted:
            state.due += [name for name in wanted if name not in state.due]
        return self.called()

    def called(self) -> Called:
        state = self.state
        return Called(state.called, state.step, dict(state.steps), state.floor)

    def begin(self, turn: int, step: int, there: Iterable[Identity], candidates: Sequence[str]) -> Validation:
        """All workers have come. A validation that is still running was left by all who could finish it."""
        state = self.state
        inside = dict(there)
        runs = [Run(name, candidate) for candidate in candidates for name in state.due]
        state.now = Validation(turn, step, runs, inside, sorted(inside))
        state.steps.update(dict.fromkeys(state.due, step))
        state.called, state.due = 0, []
        return state.now

    def pulled(self, turn: int, owner: Identity, step: int) -> None:
        """This worker has pulled the parameters."""
        now = self.of(turn, owner)
        if now is not None:
            now.absent = [name for name in now.absent if name != owner[0]]
            now.step = max(now.step, step)
            self.state.steps.update(dict.fromkeys(now.sets, now.step))

    def said_own(self, turn: int, owner: Identity, name: str, values: Mapping[str, float]) -> None:
        """A worker's own model was validated on a set; after the last set the worker is done."""
        now = self.of(turn, owner)
        if now is not None:
            prefix = f"{name}/" if name else ""
            now.own.setdefault(owner[0], {}).update({f"{prefix}{key}": value for key, value in values.items()})
            if name == now.sets[-1]:
                now.awaited = [one for one in now.awaited if one != owner[0]]

    def of(self, turn: int, owner: Identity) -> Validation | None:
        """The running validation, if it has this turn and this incarnation takes part."""
        now = self.state.now
        return now if now is not None and now.turn == turn and now.is_in(owner) else None

    def ask(self, owner: Identity, message: AskValidationShard) -> GivenValidationShard:
        """Takes the result of a validation shard and returns the next one."""
        now = self.of(message.turn, owner)
        if now is None:
            return GivenValidationShard(0)
        run = now.run(message.set, message.candidate)
        run.open(message.num_samples, message.batch)
        if message.validation_shard:
            run.finish(message.validation_shard, owner, message.sums, message.errors)
        # A shard requested twice was lost on the way.
        lost = next(
            (number for number, validation_shard in run.shards.items() if validation_shard.owner == owner), None
        )
        number = lost if lost is not None else self.state.next_shard
        validation_shard = run.shards[number] if lost is not None else run.take(number, owner, len(now.inside))
        if validation_shard is None:
            return GivenValidationShard(0)
        self.state.next_shard = max(self.state.next_shard, number + 1)
        return GivenValidationShard(number, validation_shard.begin, validation_shard.end)

    def end(self) -> Validation | None:
        """Ends and returns the running validation, if all of it is done."""
        now = self.state.now
        if now is None or not now.is_finished:
            return None
        self.state.now = None
        self.state.metrics = sorted({*self.state.metrics, *now.values()})
        return now

    def give_up(self) -> Validation | None:
        """Gives up the running validation if no worker takes part any more: another one of its sets is called."""
        now, state = self.state.now, self.state
        if now is None or not now.is_lost:
            return None
        state.now = None
        state.num_given_up += 1
        if not state.called:
            state.turn += 1
            state.called, state.step, state.due = state.turn, 0, []
        state.due += [name for name in now.sets if name not in state.due]
        return now
