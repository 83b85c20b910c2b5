"""Messages about validations: calling all workers, attending, validation shards, and results."""

from __future__ import annotations

from syncline.core.checkpoint.manifest import SavedFile
from syncline.core.wire.message import Message

#: The job's parameters, validated first. Their readings are the job's.
WEIGHTS = "weights"
#: The servers' running average of the parameters.
AVERAGE = "average"
#: The mean of the last checkpoints.
MEAN = "mean"
#: With local steps: a worker's model before averaging, reported under the worker's name.
OWN = "own"


class Come(Message, frozen=True):
    """A validation is due at a worker: for each set, the step from which on. Answered with `Called`.

    `epoch`: the worker has just finished this epoch; there is a validation after each.
    """

    step: int
    due: dict[str, int]
    epoch: int = -1


class Called(Message, frozen=True):
    """All workers must attend validation number `turn`; in rounds at this step, or where they wait. 0: none.

    `steps`: the step at which each set was last validated; for other sets, `floor`. Also sent to all when the first
    worker has come.
    """

    turn: int
    step: int = 0
    steps: dict[str, int] = {}
    floor: int = 0


class Attend(Message, frozen=True):
    """This worker has arrived and nothing of it is in flight. Answered with `Done` when all have arrived and the
    save is made.
    """

    turn: int


class Begin(Message, frozen=True):
    """This worker has pulled the parameters of this step. Answered with `Begun` when all have."""

    turn: int
    step: int


class Begun(Message, frozen=True):
    """What is validated: sets, and candidates for the best. Empty: it is over, or began without this worker."""

    step: int
    sets: list[str] = []
    candidates: list[str] = []
    folder: str = ""  # of a candidate's weights that are not on the servers


class AskValidationShard(Message, frozen=True):
    """A worker requests its next validation shard of a set. `validation_shard`: the one it has finished, with sums
    over its samples and their rounding errors.

    `num_samples` and `batch` describe the set and are the same in all workers.
    """

    turn: int
    set: str
    candidate: str
    num_samples: int
    batch: int
    validation_shard: int = 0
    sums: dict[str, float] = {}
    errors: dict[str, float] = {}


class GivenValidationShard(Message, frozen=True):
    """Positions to read, from and to; 0: others hold the rest, or nothing is left."""

    validation_shard: int
    begin: int = 0
    end: int = 0


class AskReading(Message, frozen=True):
    """A worker has found nothing more to read. `waits`: answered when the validation is over or there is more;
    otherwise at once, and the worker leaves this validation.
    """

    turn: int
    waits: bool


class LocalCandidate(Message, frozen=True):
    """With local steps: the results of this worker's own model, before averaging, on a whole set."""

    turn: int
    set: str
    values: dict[str, float]


class WriteCandidate(Message, frozen=True):
    """To a worker: its own model of this validation is the best; write it to this file. Answered with
    `WrittenCandidate`.
    """

    turn: int
    folder: str
    file: str


class WrittenCandidate(Message, frozen=True):
    """The candidate is on disk."""

    file: SavedFile


class GivenReading(Message, frozen=True):
    """`is_over`: the readings are there, or were given up; otherwise there is more to read."""

    is_over: bool
    values: dict[str, float] = {}
