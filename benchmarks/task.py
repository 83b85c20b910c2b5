"""What a process of either side does in its turns; it travels as JSON on the command line."""

from __future__ import annotations

import msgspec


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation, and all that it depends on."""

    kind: str
    side: str = ""
    num_bytes: int = 0  #: of float32 parameters, where they are no model's
    other_bytes: int = 0  #: of parameters that are registered beside them, and not pushed
    own_arrays: bool = False  #: push from arrays outside the arena
    is_random: bool = False  #: what is pushed is drawn once; else all ones
    rule: str = "SGD"
    num_bystanders: int = 0  #: the first so many workers register, and then rest
    model: str = ""
    overlap: bool = True  #: gradients leave while backward goes on
    widths: list[int] = []  #: of an MLP, where no model is named
    device: str = "cpu"  #: of the model
    num_threads: int = 0  #: of torch; 0: as torch has it
    num_uncounted: int = 1  #: operations at the beginning of a turn, until it goes as it will go on
    path: str = ""  #: of the file that is read
    shuffle: bool = False
    num_samples: int = 0  #: of a data set
    address: str = ""  #: on which a partner in another namespace listens
    prefix: list[str] = []  #: command words that start that partner
    number: int = 0  #: which process of its side it is
    num_processes: int = 1


def to_arguments(task: Task, side: str, path: str) -> list[str]:
    """The command line's last words: the task, and where the process waits for its turns."""
    return [msgspec.json.encode(msgspec.structs.replace(task, side=side)).decode(), path]


def read_arguments(arguments: list[str]) -> tuple[Task, str]:
    """What a process was told on its command line."""
    return msgspec.json.decode(arguments[0], type=Task), arguments[1]
