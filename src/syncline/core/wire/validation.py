"""What is said about validations: calling all workers, coming together, validation shards of a set, and what comes
out."""

from __future__ import annotations

from syncline.core.checkpoint.manifest import SavedFile
from syncline.core.wire.message import Message

#: What is validated first: the job's parameters. Their readings are the job's.
WEIGHTS = "weights"
#: The average that servers keep of them.
AVERAGE = "average"
#: The mean of the last checkpoints.
MEAN = "mean"
#: With local steps: what a worker has before it is averaged; told under the worker's name.
OWN = "own"


class Come(Message, frozen=True):
    """A validation is due at a worker: of each set the step from which on it is. Answered with `Called`.

    `epoch`: this worker is behind it, and that is why; behind each there is one.
    """

    step: int
    due: dict[str, int]
    epoch: int = -1


class Called(Message, frozen=True):
    """All workers are to come to validation number `turn`; in rounds at this step, or where they wait. 0: to none.

    `steps`: at which step each set was validated last; of others, `floor`. Also told to all when the first has come.
    """

    turn: int
    step: int = 0
    steps: dict[str, int] = {}
    floor: int = 0


class Attend(Message, frozen=True):
    """This worker is there, and nothing of it is under way. Answered with `Done` when all are, and it was saved."""

    turn: int


class Begin(Message, frozen=True):
    """Then: this worker has the parameters of this step. Answered with `Begun` when all have."""

    turn: int
    step: int


class Begun(Message, frozen=True):
    """What is validated: sets, and candidates for the best. None: it is over, or began without this worker."""

    step: int
    sets: list[str] = []
    candidates: list[str] = []
    folder: str = ""  # where the weights of a candidate lie that are not on the servers


class AskValidationShard(Message, frozen=True):
    """A worker wants its next validation shard of a set. `validation_shard`: the one that it is through with; the
    sums over its samples, and of their rounding errors.

    `num_samples` and `batch` are of the set, the same in all workers.
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
    """Positions to read, from and to; 0: all that is left is in others' hands, or nothing is."""

    validation_shard: int
    begin: int = 0
    end: int = 0


class AskReading(Message, frozen=True):
    """A worker has found nothing more to read. `waits`: it is answered when the validation is over, or there is
    more; else at once, and it is in this validation no more."""

    turn: int
    waits: bool


class LocalCandidate(Message, frozen=True):
    """With local steps: what this worker's own model, before it was averaged, has come to on a whole set."""

    turn: int
    set: str
    values: dict[str, float]


class WriteCandidate(Message, frozen=True):
    """To a worker: its own model of this validation is the best; it goes to this file. Answered with
    `WrittenCandidate`."""

    turn: int
    folder: str
    file: str


class WrittenCandidate(Message, frozen=True):
    """It is on disk."""

    file: SavedFile


class GivenReading(Message, frozen=True):
    """`is_over`: the readings are there, or were given up; else there is more to read."""

    is_over: bool
    values: dict[str, float] = {}
