"""The leader of a pipeline: it shares the model with its stage processes, and tells them what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed

from syncline.core.stages import num_parts
from syncline.errors import ConfigError, ConnectionLost
from syncline.stats import StageStats
from syncline.torch.pipelining.cutting import Layers, digest
from syncline.torch.pipelining.deferred import forget
from syncline.torch.pipelining.engine import (
    LossFunction,
    StageEngine,
    autocast_now,
    describe,
    empty,
    infer,
)
from syncline.torch.pipelining.holding import Holdings, Tensors
from syncline.torch.pipelining.orders import (
    Answer,
    Cut,
    Evaluate,
    Evaluated,
    Infer,
    Inferred,
    Modes,
    Order,
    Place,
    PrepareBatches,
    Ready,
    ShareTensors,
    Stepped,
    TensorMeta,
    TrainStep,
)
from syncline.torch.pipelining.shared import SharedBlocks, layout
from syncline.worker.arrays import Bytes
from syncline.worker.job import Job
from syncline.worker.stages import StageProcess

A = TypeVar("A", bound=Answer)
dist: Any = torch.distributed  # its types are incomplete
#: Kinds of batches whose buffers are kept: full and short batches, of training and of evaluation.
_MOST_KINDS = 6


class _Kind(NamedTuple):
    """What a schedule is made for."""

    shapes: tuple[tuple[tuple[int, ...], str], ...]
    num_micro_batches: int
    trains: bool
    autocast: str


class StageLeader:
    """The stage processes of this worker, from its script's thread."""

    def __init__(self, job: Job, layers: Layers, firsts: list[int], loss_fn: LossFunction) -> None:
        assert job.stages is not None
        self._stages, self._processes = job.stages, job.stages.processes
        self._blocks = SharedBlocks()
        size = self._stages.num_processes
        count = num_parts(job.config)
        self._tensors = Tensors(layers.model)
        for process in self._processes:
            self._send(process, Cut(firsts, digest(layers.model)))
        parts = layers.parts(firsts)
        self._holdings = [Holdings(self._tensors, parts[number::size]) for number in range(size)]
        self._engine = StageEngine({n: parts[n] for n in range(0, count, size)}, count, loss_fn, job.config.schedule)
        self._count, self._size = count, size
        self._holdings[0].materialise()
        forget()
        self._all_modules = list(layers.model.modules())
        self._modes: list[bool] = []
        self._kinds: dict[_Kind, int] = {}
        self._next_kind = 0
        self._told: list[dict[int, Place]] = [{} for _ in range(size)]
        self._sent_blocks: list[set[int]] = [set() for _ in range(size)]
        self._gradients: list[dict[int, torch.Tensor]] = [{} for _ in range(size)]
        self._busy_seconds, self._step_seconds, self._num_steps = [0.0] * size, 0.0, 0
        self._share()
        self._engine.join(0, size, self._stages.store_fd, job.config.wait_seconds)

    # -- what is shared -----------------------------------------------------------------------------------

    def create_memory(self, num_bytes: int) -> Bytes:
        return self._blocks.create_numbered(num_bytes)[1]

    def _share(self) -> None:
        """Parameters and buffers of other stages get a place in shared memory; who has them writes their values."""
        own = self._holdings[0]
        firsts: dict[int, int] = {}  # of each parameter: the first process that has it
        for number, holdings in enumerate(self._holdings):
            for index in holdings.parameters:
                firsts.setdefault(index, number)
        shared = sorted({index for holdings in self._holdings[1:] for index in holdings.parameters})
        buffers = sorted({index for holdings in self._holdings[1:] for index in holdings.buffers})
        if clash := [self._tensors.buffer_names[index] for index in buffers if index in own.buffers]:
            raise ConfigError(f"Pipeline: the buffer {clash[0]!r} is in two stages; keep it in one")
        parameters = self._tensors.parameters
        of_parameter = self._place(shared, parameters)
        of_buffer = self._place(buffers, self._tensors.buffers)
        views = {index: self._blocks.view(place, parameters[index]) for index, place in of_parameter.items()}
        self._tensors.move({index: view for index, view in views.items() if not firsts[index]}, fill=True)
        for number in range(1, self._size):
            holdings = self._holdings[number]
            learning = [i for i in holdings.parameters if parameters[i].requires_grad]
            gradients = self._place(learning, parameters)
            self._gradients[number] = {i: self._blocks.view(place, parameters[i]) for i, place in gradients.items()}
            self._tell(
                number,
                [of_parameter[i] for i in holdings.parameters],
                [of_buffer[i] for i in holdings.buffers],
                list(gradients.values()),
                [i for i in holdings.parameters if firsts[i] == number],
            )
        for process in self._processes:
            self._answer(process, Ready)
        self._tensors.move({index: view for index, view in views.items() if firsts[index]}, fill=False)
        found = {index: self._blocks.view(place, self._tensors.buffers[index]) for index, place in of_buffer.items()}
        self._tensors.move_buffers(found, fill=False)

    def _place(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> dict[int, Place]:
        """A place for each of these in a new block."""
        offsets, end = layout(tensors[index] for index in indices)
        number, _ = self._blocks.create_numbered(end)
        return {index: Place(index, number, offset) for index, offset in zip(indices, offsets, strict=True)}

    def _tell(
        self,
        number: int,
        parameters: list[Place],
        buffers: Sequence[Place] = (),
        gradients: Sequence[Place] = (),
        fills: Sequence[int] = (),
        drops: Sequence[int] = (),
    ) -> None:
        used = {place.block for place in (*parameters, *buffers, *gradients)} - self._sent_blocks[number]
        blocks, fds = self._blocks.describe(used)
        order = ShareTensors(blocks, parameters, list(buffers), list(gradients), list(fills), list(drops))
        self._send(self._processes[number - 1], order, fds)
        self._sent_blocks[number] |= used
        self._told[number].update((place.index, place) for place in parameters)

    def _follow_moves(self) -> None:
        """An optimizer has moved parameters to memory of its own: stage processes follow."""
        parameters, before = self._tensors.parameters, self._blocks_told()
        changes: dict[int, list[Place]] = {}
        for number in range(1, self._size):
            moved = []
            for index, known in self._told[number].items():
                place = self._blocks.place_of(index, parameters[index])
                if place is None:
                    raise ConfigError(
                        f"Pipeline: the script has given {self._tensors.names[index]!r} other memory (.data = …); "
                        "write into it in place (.copy_())"
                    )
                if place != known:
                    moved.append(place)
            if moved:
                changes[number] = moved
        for number, moved in changes.items():
            self._told[number].update((place.index, place) for place in moved)
        left = before - self._blocks_told()
        for number, moved in changes.items():
            self._tell(number, moved, drops=sorted(left))
            self._answer(self._processes[number - 1], Ready)
        self._blocks.drop(left)

    def _blocks_told(self) -> set[int]:
        """The blocks in which other stages have parameters."""
        return {place.block for told in self._told for place in told.values()}

    # -- orders -------------------------------------------------------------------------------------------

    def _send(self, process: StageProcess, order: Order, fds: Sequence[int] = ()) -> None:
        try:
            process.channel.send(order, fds)
        except ConnectionLost as error:
            raise self._stages.explain(error) from None

    def _answer(self, process: StageProcess, kind: type[A]) -> A:
        try:
            answer, _ = process.channel.receive(Answer)
        except ConnectionLost as error:
            raise self._stages.explain(error) from None
        assert isinstance(answer, kind), answer
        return answer

    def _tell_modes(self) -> None:
        modes = [module.training for module in self._all_modules]
        if modes != self._modes:
            self._modes = modes
            for process in self._processes:
                self._send(process, Modes(modes))

    def _kind_of(self, inputs: Sequence[torch.Tensor], count: int, *, trains: bool) -> int:
        """The number of the schedule for such a batch; made, and its buffers allocated, at the first one."""
        shapes = tuple((tuple(t.shape), str(t.dtype)) for t in inputs)
        kind = _Kind(shapes, count, trains, autocast_now())
        known = self._kinds.pop(kind, None)
        if known is not None:
            self._kinds[kind] = known  # the latest
            return known
        boundaries = [[TensorMeta([m.shape[0] // count, *m.shape[1:]], m.dtype) for m in describe(inputs)]]
        for part in range(self._count):
            boundaries.append(self._infer(part, boundaries[-1], kind.autocast))
        forgets = [self._kinds.pop(next(iter(self._kinds))) for _ in range(len(self._kinds) + 1 - _MOST_KINDS)]
        order = PrepareBatches(self._next_kind, count, boundaries, trains, kind.autocast, forgets)
        self._next_kind += 1
        for process in self._processes:
            self._send(process, order)
        self._engine.prepare(order)
        self._kinds[kind] = order.key
        return order.key

    def _infer(self, part: int, inputs: list[TensorMeta], autocast: str) -> list[TensorMeta]:
        owner = part % self._size
        if not owner:
            return infer(self._engine.parts[part], inputs, autocast)
        process = self._processes[owner - 1]
        self._send(process, Infer(part, inputs, autocast))
        return self._answer(process, Inferred).outputs

    def step(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, count: int, scale: float) -> float:
        """A batch through all stages; its mean loss. The gradients of all stages are in the leader's parameters."""
        began = time.perf_counter()
        self._follow_moves()
        self._tell_modes()
        key = self._kind_of(inputs, count, trains=True)
        target = target.detach().contiguous()
        meta = describe([target])[0]
        for number, process in enumerate(self._processes, 1):
            self._send(process, TrainStep(key, meta, scale, self._kept(number)))
        loss: float | None = self._together(lambda: self._run(key, inputs, target, scale))
        for number, process in enumerate(self._processes, 1):
            answer = self._answer(process, Stepped)
            loss = answer.loss if (self._count - 1) % self._size == number else loss
            self._take_gradients(number, answer.touched)
            self._busy_seconds[number] += answer.busy_seconds
        self._busy_seconds[0] += self._engine.busy_seconds
        self._step_seconds += time.perf_counter() - began
        self._num_steps += 1
        assert loss is not None
        return loss

    def stats(self) -> tuple[StageStats, ...]:
        return tuple(
            StageStats(number, self._num_steps, busy, self._step_seconds)
            for number, busy in enumerate(self._busy_seconds)
        )

    def _run(self, key: int, inputs: Sequence[torch.Tensor], target: torch.Tensor, scale: float) -> float | None:
        last = (self._count - 1) % self._size
        sent = dist.isend(target, last) if last else None
        loss = self._engine.step(key, inputs, None if last else target, scale)
        if sent is not None:
            sent.wait()
        return loss

    def _together(self, action: Callable[[], Any]) -> Any:
        """Runs what all processes do at once. If a connection breaks, the process that has ended says why."""
        try:
            return action()
        except RuntimeError as error:
            found = self._stages.explain(error)
            if found is error:
                raise
            raise found from None

    def _kept(self, number: int) -> list[int]:
        """The parameters of this process whose gradients are added to."""
        parameters = self._tensors.parameters
        kept = []
        for index, view in self._gradients[number].items():
            gradient = parameters[index].grad
            if gradient is None or not self._is_first(number, index):
                continue
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
            kept.append(index)
        return kept

    def _is_first(self, number: int, index: int) -> bool:
        return not any(index in holdings.parameters for holdings in self._holdings[:number])

    @torch.no_grad()
    def _take_gradients(self, number: int, touched: Sequence[int]) -> None:
        """Gradients of tied weights are added up in the order of the stages."""
        parameters = self._tensors.parameters
        for index in touched:
            view, parameter = self._gradients[number][index], parameters[index]
            if self._is_first(number, index):
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.add_(view)

    def evaluate(self, inputs: Sequence[torch.Tensor], count: int) -> Any:
        """The output of the last stage."""
        self._follow_moves()
        self._tell_modes()
        key = self._kind_of(inputs, count, trains=False)
        for process in self._processes:
            self._send(process, Evaluate(key))
        output = self._together(lambda: self._engine.evaluate(key, inputs))
        last = (self._count - 1) % self._size
        for number, process in enumerate(self._processes, 1):
            answer = self._answer(process, Evaluated)
            if number == last:
                output = self._together(lambda said=answer: self._receive(last, said))  # type: ignore[misc]
        return output

    @staticmethod
    def _receive(source: int, said: Evaluated) -> Any:
        tensors = [empty(meta) for meta in said.outputs]
        for tensor in tensors:
            dist.recv(tensor, source)
        return tuple(tensors) if said.is_tuple else tensors[0]
