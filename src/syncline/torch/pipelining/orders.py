"""What the leader of a pipeline tells its stage processes, and what they answer."""

from __future__ import annotations

import msgspec

from syncline.stats import StageSpan


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """Shape and type of a tensor that travels between two stages."""

    shape: list[int]
    dtype: str
    requires_grad: bool = False


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in shared memory. `index`: of a parameter or buffer of the whole model."""

    index: int
    block: int
    offset: int


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Shared memory; its file descriptor comes with the message."""

    number: int
    num_bytes: int


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Where the model is cut: the number of the first layer of every part. `digest`: of the leader's model."""

    firsts: list[int]
    digest: str


class Recut(msgspec.Struct, frozen=True, tag=True):
    """The model is cut here from now on. What a process holds in addition comes with the next ShareTensors."""

    firsts: list[int]


class GroupPlace(msgspec.Struct, frozen=True, array_like=True):
    """A process's place in a process group that the script has made."""

    rank: int
    size: int


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """All processes find each other. `ranks`: theirs in the script's process group; empty: it has made none."""

    ranks: list[int]


class ShareTensors(msgspec.Struct, frozen=True, tag=True):
    """From now on these tensors lie there. `fills`: parameters whose values this process has and writes first.

    `fills_buffers`: likewise buffers.
    """

    blocks: list[Block]
    parameters: list[Place]
    buffers: list[Place] = []
    gradients: list[Place] = []
    fills: list[int] = []
    fills_buffers: list[int] = []
    drops: list[int] = []  #: blocks that are used no more


class Infer(msgspec.Struct, frozen=True, tag=True):
    """Which tensors does this part of the model make of these? `batch`: a micro-batch, as it enters the model."""

    part: int
    inputs: list[TensorMeta]
    autocast: str
    batch: list[TensorMeta]


class PrepareBatches(msgspec.Struct, frozen=True, tag=True):
    """A new kind of batch. `boundaries`: the tensors before each part, and after the last one."""

    key: int
    num_micro_batches: int
    boundaries: list[list[TensorMeta]]
    trains: bool
    autocast: str
    forgets: list[int] = []  #: earlier kinds that do not come again


class Modes(msgspec.Struct, frozen=True, tag=True):
    """Which modules, in the order of `model.modules()`, are in training mode."""

    training: list[bool]


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Forward, loss and backward of one batch. `keeps`: parameters whose gradients are added to."""

    key: int
    target: TensorMeta
    scale: float
    keeps: list[int] = []


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """A forward without gradients; the last stage sends its output."""

    key: int


class RandomStates(msgspec.Struct, frozen=True, array_like=True):
    """The random states of a process: that of Python as JSON; the others as a tree and the bytes of its arrays."""

    python: bytes
    tree: bytes
    tensors: list[bytes]


class Randomize(msgspec.Struct, frozen=True, tag=True):
    """These random states, or the ones that this seed makes."""

    states: RandomStates | None = None
    seed: int = 0


Order = Cut | Recut | JoinGroup | ShareTensors | Infer | PrepareBatches | Modes | TrainStep | Evaluate | Randomize


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Done. `group`: the place in a process group that the script has made."""

    group: GroupPlace | None = None


class Inferred(msgspec.Struct, frozen=True, tag=True):
    """The tensors that a part makes."""

    outputs: list[TensorMeta]


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """A step is made. `loss`: of the last stage, the mean. `touched`: parameters that have a gradient.

    `spans`: its forwards and backwards, by the clock that all processes of a host share. `random`: its random states,
    if they have changed.
    """

    loss: float
    touched: list[int]
    spans: list[StageSpan]
    random: RandomStates | None = None


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """What the last stage sends; nothing from the others. `is_tuple`: the model gives several tensors.

    `random`: as in a step.
    """

    outputs: list[TensorMeta]
    is_tuple: bool = False
    random: RandomStates | None = None


Answer = Ready | Inferred | Stepped | Evaluated
