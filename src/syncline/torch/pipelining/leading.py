"""The leader of a pipeline: it shares the model with its stage processes, and tells them what to do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

from syncline.core.stages import num_parts
from syncline.errors import ConfigError, ConnectionLost
from syncline.net.shm import SharedMemory
from syncline.stats import StageSpan, StageStats
from syncline.torch.pipelining.cutting import Layers, digest
from syncline.torch.pipelining.deferred import forget
from syncline.torch.pipelining.engine import (
    LossFunction,
    StageEngine,
    autocast_now,
    describe,
    empty,
    infer,
    num_bytes,
)
from syncline.torch.pipelining.group import PipelineGroup, own_place, ranks_of
from syncline.torch.pipelining.holding import Tensors, UnwrittenBuffers, in_several, share_out
from syncline.torch.pipelining.orders import (
    Answer,
    Cut,
    Evaluate,
    Evaluated,
    GroupPlace,
    Infer,
    Inferred,
    JoinGroup,
    Modes,
    Order,
    Place,
    PrepareBatches,
    Ready,
    Recut,
    ShareTensors,
    Stepped,
    TensorMeta,
    TrainStep,
)
from syncline.torch.pipelining.randomness import StageRandomness
from syncline.torch.pipelining.shared import SharedBlocks, layout
from syncline.worker.arrays import Bytes
from syncline.worker.job import Job
from syncline.worker.stages import StageProcess

A = TypeVar("A", bound=Answer)
#: Kinds of batches whose buffers are kept: full and short batches, of training and of evaluation.
_MOST_KINDS = 6


class _Kind(NamedTuple):
    """What a schedule is made for."""

    shapes: tuple[tuple[tuple[int, ...], str], ...]
    num_micro_batches: int
    trains: bool
    autocast: str
    modes: tuple[bool, ...]  # of a traced model: a trace has those of its time


class _Gradient(NamedTuple):
    """Where the gradient of a parameter of another stage lies, and the view of it here."""

    place: Place
    view: torch.Tensor


class StageLeader:
    """The stage processes of this worker, from its script's thread."""

    def __init__(self, job: Job, layers: Layers, loss_fn: LossFunction) -> None:
        assert job.stages is not None
        self._job, self._stages, self._processes = job, job.stages, job.stages.processes
        self._blocks = SharedBlocks()
        self._size, self._count = self._stages.num_processes, num_parts(job.config)
        self._group = PipelineGroup(0, self._size)
        self._layers, self._loss_fn, self._schedule = layers, loss_fn, job.config.schedule
        self._tensors = Tensors(layers.model)
        self.firsts = layers.firsts(self._count)
        for process in self._processes:
            self._send(process, Cut(self.firsts, digest(layers.model)))
        self._all_modules = list(layers.model.modules())
        self._modes: list[bool] = []
        self._next_kind = 0
        self._where: dict[int, Place] = {}  # all parameters
        self._told: list[dict[int, Place]] = [{} for _ in range(self._size)]
        self._sent_blocks: list[set[int]] = [set() for _ in range(self._size)]
        self._gradients: list[dict[int, _Gradient]] = [{} for _ in range(self._size)]
        self._spare_gradients: dict[int, list[_Gradient]] = {}
        self._arena: dict[int, _Gradient] = {}  # where gradients are sent from
        self._hooked: set[int] = set()  # of the leader's own parameters
        self._touched: set[int] = set()  # of them, those that have got a gradient in this step
        self._last_step: tuple[float, list[StageSpan]] = (0.0, [])
        self._why_broken = ""
        self._randomness = StageRandomness(
            job, self._size, lambda number, order: self._send(self._processes[number - 1], order)
        )
        self._follow_cut()
        self._holdings[0].materialise(self._tensors)
        forget()
        ranks = ranks_of([own_place(), *self._share()])
        for process in self._processes:
            self._send(process, JoinGroup(ranks))
        self._together(lambda: self._group.join(ranks, self._stages.store_fd, job.config.wait_seconds))
        self._stages.measure_by(self.stats)
        self._stages.are_ready()

    def _follow_cut(self) -> None:
        """What depends on where the model is cut."""
        self._holdings = share_out(self._tensors, self._layers, self.firsts, self._size)
        own = range(0, self._count, self._size)
        self._engine = StageEngine(
            own, self._count, self._loss_fn, self._schedule, self._stages.activity, self._group
        )
        self._kinds: dict[_Kind, int] = {}
        self._crossing: dict[int, list[int]] = {}  # by kind, the bytes of a step through each cut
        #: Of each process, in forwards and backwards, since the model was cut as it is; as `num_samples`.
        self.busy_seconds = [0.0] * self._size
        self._sent_bytes = [0] * self._size
        self._step_seconds, self._num_steps, self.num_samples = 0.0, 0, 0
        held_by_several = in_several(self._holdings)
        own_buffers = set(self._holdings[0].buffers)
        self._unwritten = UnwrittenBuffers(self._tensors, [i for i in held_by_several if i in own_buffers])

    # -- what is shared -----------------------------------------------------------------------------------

    @property
    def shared_bytes(self) -> int:
        """Of the parameters, buffers and gradients of all stages."""
        return self._blocks.num_bytes

    def create_memory(self, num_bytes: int) -> Bytes:
        return self._blocks.create_numbered(num_bytes)[1]

    def _share(self) -> list[GroupPlace | None]:
        """All parameters and buffers get a place in shared memory; the process that has them writes their values.

        Returns the places of stage processes in a process group that the script has made.
        """
        firsts: dict[int, int] = {}  # of each parameter: the first process that has it
        first_buffers: dict[int, int] = {}
        for number, holdings in enumerate(self._holdings):
            for index in holdings.parameters:
                firsts.setdefault(index, number)
            for index in holdings.buffers:
                first_buffers.setdefault(index, number)
        parameters, buffers = self._tensors.parameters, self._tensors.buffers
        self._where = self._place(range(len(parameters)), parameters)
        self._where_buffers = self._place(range(len(buffers)), buffers)
        views = {index: self._blocks.view(place, parameters[index]) for index, place in self._where.items()}
        of_buffers = {index: self._blocks.view(place, buffers[index]) for index, place in self._where_buffers.items()}
        self._tensors.move({i: view for i, view in views.items() if not firsts[i]}, fill=True)
        self._tensors.move_buffers({i: view for i, view in of_buffers.items() if not first_buffers[i]}, fill=True)
        for number in range(1, self._size):
            holdings = self._holdings[number]
            fills = [i for i in holdings.parameters if firsts[i] == number]
            fills_buffers = [i for i in holdings.buffers if first_buffers[i] == number]
            self._give(number, holdings.parameters, holdings.buffers, fills, fills_buffers)
        places = [self._answer(process, Ready).group for process in self._processes]
        self._tensors.move({i: view for i, view in views.items() if firsts[i]}, fill=False)
        self._tensors.move_buffers({i: view for i, view in of_buffers.items() if first_buffers[i]}, fill=False)
        self._unwritten.note()
        return places

    def _give(
        self,
        number: int,
        parameters: Sequence[int],
        buffers: Sequence[int],
        fills: Sequence[int] = (),
        fills_buffers: Sequence[int] = (),
    ) -> None:
        """Tells a process where these tensors lie, and makes room for gradients."""
        tensors = self._tensors.parameters
        learning = [index for index in parameters if tensors[index].requires_grad]
        known = {i: self._arena[i] for i in learning if self._may_use_arena(number, i)}
        known.update(
            {i: self._spare_gradients[i].pop() for i in learning if i not in known and self._spare_gradients.get(i)}
        )
        made = self._place([index for index in learning if index not in known], tensors)
        known.update({i: _Gradient(place, self._blocks.view(place, tensors[i])) for i, place in made.items()})
        self._gradients[number].update(known)
        self._tell(
            number,
            [self._where[index] for index in parameters],
            [self._where_buffers[index] for index in buffers],
            [gradient.place for gradient in known.values()],
            fills,
            fills_buffers,
        )

    def keep_gradients(self, memory: SharedMemory, offsets: Mapping[torch.Tensor, int]) -> None:
        """Gradients of these parameters are made here from now on. Of a tied one, the first process does."""
        self._follow_moves()
        block = self._blocks.adopt(memory)
        for tensor, offset in offsets.items():
            index = self._tensors.number_of.get(id(tensor))
            if index is not None:
                place = Place(index, block, offset)
                self._arena[index] = _Gradient(place, self._blocks.view(place, tensor))
        for number in range(1, self._size):
            found = {i: self._arena[i] for i in self._gradients[number] if self._may_use_arena(number, i)}
            for index, gradient in found.items():
                before, parameter = self._gradients[number][index], self._tensors.parameters[index]
                if parameter.grad is not None and parameter.grad.data_ptr() == before.view.data_ptr():
                    gradient.view.copy_(before.view)
                    parameter.grad = gradient.view
            self._gradients[number].update(found)
            if found:
                self._tell(number, [], gradients=[gradient.place for gradient in found.values()])
                self._answer(self._processes[number - 1], Ready)
        self._drop_unused()

    def _may_use_arena(self, number: int, index: int) -> bool:
        """Whether the gradient of this process is the one that is sent, and no other process makes its own there."""
        return (
            index in self._arena
            and self._is_first(number, index)
            and all(each.get(index) is not self._arena[index] for each in self._gradients)
        )

    def _place_own_gradients(self) -> list[int]:
        """The leader's own parameters that have no gradient yet get one where it is sent from: which these are."""
        self._touched.clear()
        placed = []
        for index in self._holdings[0].parameters:
            parameter = self._tensors.parameters[index]
            if not parameter.requires_grad or parameter.grad is not None or not self._may_use_arena(0, index):
                continue
            if index not in self._hooked:
                self._hooked.add(index)
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._touched.add(index))
            parameter.grad = self._arena[index].view.zero_()
            placed.append(index)
        return placed

    def _drop_unused(self) -> None:
        """Frees the memory of gradients that are made elsewhere by now."""
        gradients = [g for each in self._gradients for g in each.values()]
        gradients += [g for spare in self._spare_gradients.values() for g in spare]
        used = {gradient.place.block for gradient in (*gradients, *self._arena.values())}
        used |= {place.block for place in (*self._where.values(), *self._where_buffers.values())}
        left = self._blocks.numbers - used
        for number in range(1, self._size):
            if drops := sorted(left & self._sent_blocks[number]):
                self._tell(number, [], drops=drops)
                self._answer(self._processes[number - 1], Ready)
        self._blocks.drop(left)

    def cut(self, firsts: Sequence[int]) -> bool:
        """Cuts the model elsewhere, between two steps. Nothing is copied: processes see other parts of the memory.

        False, and the cut stays, if the script has given parameters other memory, which stage processes do not see.
        """
        self._follow_moves()
        if len(self._where) < len(self._tensors.parameters):
            return False
        self._look_at_buffers()
        before, self.firsts = self._holdings, list(firsts)
        self._follow_cut()
        parameters = self._tensors.parameters
        for process in self._processes:
            self._send(process, Recut(self.firsts))
            number, held = process.number, set(self._holdings[process.number].parameters)
            for index in [index for index in self._told[number] if index not in held]:
                del self._told[number][index]
                if (left := self._gradients[number].pop(index, None)) is not None:
                    gradient = parameters[index].grad
                    if gradient is not None and gradient.data_ptr() == left.view.data_ptr():
                        parameters[index].grad = left.view.clone()
                    if left is not self._arena.get(index):
                        self._spare_gradients.setdefault(index, []).append(left)
        for process in self._processes:
            now, then = self._holdings[process.number], before[process.number]
            more = [index for index in now.parameters if index not in self._told[process.number]]
            self._give(process.number, more, [i for i in now.buffers if i not in then.buffers])
        for process in self._processes:
            self._answer(process, Ready)
        self._unwritten.note()
        return True

    @torch.no_grad()
    def _look_at_buffers(self) -> None:
        """A module of the first stage may have replaced a buffer's tensor, or its memory."""
        for index in self._holdings[0].buffers:
            buffer = self._tensors.buffers[index]
            view = self._blocks.view(self._where_buffers[index], buffer)
            if buffer.numel() and buffer.data_ptr() != view.data_ptr():
                view.copy_(buffer)
                buffer.data = view

    def _place(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> dict[int, Place]:
        """A place for each of these in a new block."""
        if not indices:
            return {}
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
        fills_buffers: Sequence[int] = (),
        drops: Sequence[int] = (),
    ) -> None:
        used = {place.block for place in (*parameters, *buffers, *gradients)} - self._sent_blocks[number]
        blocks, fds = self._blocks.describe(used)
        order = ShareTensors(
            blocks, parameters, list(buffers), list(gradients), list(fills), list(fills_buffers), list(drops)
        )
        self._send(self._processes[number - 1], order, fds)
        self._sent_blocks[number] |= used
        self._told[number].update((place.index, place) for place in parameters)

    def _follow_moves(self) -> None:
        """An optimizer has moved parameters to memory of its own: stage processes follow."""
        before = {place.block for place in self._where.values()}
        told = {index for each in self._told for index in each}
        for index, parameter in enumerate(self._tensors.parameters):
            if not parameter.numel():
                continue
            place = self._blocks.place_of(index, parameter)
            if place is not None:
                self._where[index] = place
            elif index in told:
                raise ConfigError(
                    f"Pipeline: the script has given {self._tensors.names[index]!r} other memory (.data = …); "
                    "write into it in place (.copy_())"
                )
            else:
                self._where.pop(index, None)  # of this process only, and it stays here
        left = before - {place.block for place in self._where.values()}
        for number in range(1, self._size):
            moved = [self._where[index] for index, known in self._told[number].items() if self._where[index] != known]
            drops = sorted(left & self._sent_blocks[number])
            if moved or drops:
                self._tell(number, moved, drops=drops)
                self._answer(self._processes[number - 1], Ready)
        self._blocks.drop(left)

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
        modes = tuple(self._modes) if self._layers.is_traced else ()
        kind = _Kind(shapes, count, trains, autocast_now(), modes)
        known = self._kinds.pop(kind, None)
        if known is not None:
            self._kinds[kind] = known  # the latest
            return known
        boundaries = [[TensorMeta([m.shape[0] // count, *m.shape[1:]], m.dtype) for m in describe(inputs)]]
        for part in range(self._count):
            boundaries.append(self._infer(part, boundaries[-1], kind.autocast, boundaries[0]))
        forgets = [self._kinds.pop(next(iter(self._kinds))) for _ in range(len(self._kinds) + 1 - _MOST_KINDS)]
        order = PrepareBatches(self._next_kind, count, boundaries, trains, kind.autocast, forgets)
        self._next_kind += 1
        for process in self._processes:
            self._send(process, order)
        self._engine.prepare(order, self._layers.parts(self.firsts, boundaries[0]))
        self._kinds[kind] = order.key
        self._crossing = {key: known for key, known in self._crossing.items() if key not in forgets}
        self._crossing[order.key] = [count * sum(map(num_bytes, metas)) for metas in boundaries[1:-1]]
        return order.key

    def _infer(self, part: int, inputs: list[TensorMeta], autocast: str, batch: list[TensorMeta]) -> list[TensorMeta]:
        owner = part % self._size
        if not owner:
            return infer(self._layers.parts(self.firsts, batch)[part], inputs, autocast)
        process = self._processes[owner - 1]
        self._send(process, Infer(part, inputs, autocast, batch))
        return self._answer(process, Inferred).outputs

    def step(self, inputs: Sequence[torch.Tensor], target: torch.Tensor, count: int, scale: float) -> float:
        """A batch through all stages; its mean loss. The gradients of all stages are in the leader's parameters."""
        self._check_in_turn()
        self._follow_moves()
        self._tell_modes()
        self._randomness.settle()
        key = self._kind_of(inputs, count, trains=True)
        target = target.detach().contiguous()
        meta = describe([target])[0]
        began = time.perf_counter()
        spans: list[StageSpan] = []
        self._stages.step_began = time.monotonic()
        try:
            with self._in_turn():
                for number, process in enumerate(self._processes, 1):
                    self._send(process, TrainStep(key, meta, scale, self._kept(number)))
                placed = self._place_own_gradients()
                loss: float | None = self._together(lambda: self._run(key, inputs, target, scale))
                for index in placed:
                    if index not in self._touched:
                        self._tensors.parameters[index].grad = None
                for number, process in enumerate(self._processes, 1):
                    answer = self._answer(process, Stepped)
                    loss = answer.loss if (self._count - 1) % self._size == number else loss
                    self._take_gradients(number, answer.touched)
                    self._randomness.hear(number, answer.random)
                    spans += answer.spans
        finally:
            self._stages.step_began = None
        spans += self._engine.spans
        for span in spans:
            self.busy_seconds[span.stage] += span.end - span.begin
        self._last_step = began, spans
        self._job.exchange.times.computed_in_stages(spans)
        for cut, crossing in enumerate(self._crossing[key]):  # activations go down, as many bytes of gradients up
            self._sent_bytes[cut % self._size] += crossing
            self._sent_bytes[(cut + 1) % self._size] += crossing
        self._step_seconds += time.perf_counter() - began
        self._num_steps += 1
        self.num_samples += inputs[0].shape[0]
        self._unwritten.check()
        assert loss is not None
        return loss

    def stats(self) -> tuple[StageStats, ...]:
        """Of all steps since the model was cut as it is."""
        return tuple(
            StageStats(
                stage=number,
                num_steps=self._num_steps,
                busy_seconds=self.busy_seconds[number],
                step_seconds=self._step_seconds,
                layers=" + ".join(self._told_layers(part) for part in range(number, self._count, self._size)),
                sent_bytes=self._sent_bytes[number],
                parameter_bytes=sum(self._tensors.parameters[i].nbytes for i in self._holdings[number].parameters),
            )
            for number in range(self._size)
        )

    def timeline(self) -> tuple[StageSpan, ...]:
        """The newest step."""
        began, spans = self._last_step
        shifted = (msgspec.structs.replace(span, begin=span.begin - began, end=span.end - began) for span in spans)
        return tuple(sorted(shifted, key=lambda span: (span.stage, span.begin)))

    def _told_layers(self, part: int) -> str:
        names = self._layers.names[self.firsts[part] : [*self.firsts, len(self._layers.names)][part + 1]]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"

    def _run(self, key: int, inputs: Sequence[torch.Tensor], target: torch.Tensor, scale: float) -> float | None:
        last = (self._count - 1) % self._size
        sent = self._group.isend(target, last) if last else None
        loss = self._engine.step(key, inputs, None if last else target, scale)
        if sent is not None:
            sent.wait()
        return loss

    def _check_in_turn(self) -> None:
        """Raises if a batch has failed: other processes may wait for the rest of it."""
        if self._why_broken:
            raise ConnectionLost(
                f"Pipeline: an earlier batch failed ({self._why_broken}), and the processes of this pipeline are out "
                "of turn; end the script after such an error: a worker that fails is started again (--max-restarts)"
            )

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """What all processes do at once. If it fails, the pipeline is broken."""
        try:
            yield
        except BaseException as error:
            lines = [type(error).__name__, *filter(str.strip, str(error).splitlines())]
            told = [": ".join(lines[:2]), *(lines[2:] and [lines[-1].strip()])]
            self._why_broken = " … ".join(told)
            raise

    def _together(self, action: Callable[[], Any]) -> Any:
        """Runs what all processes do at once. If a connection breaks, the process that has ended says why."""
        try:
            return action()
        except RuntimeError as error:
            if self._engine.has_failed:  # its own stage, or the loss
                raise
            found = self._stages.explain(error)
            if found is error:
                raise
            raise found from None

    def _kept(self, number: int) -> list[int]:
        """The parameters of this process whose gradients are added to."""
        parameters = self._tensors.parameters
        kept = []
        for index, (_, view) in self._gradients[number].items():
            gradient = parameters[index].grad
            if gradient is None or not self._is_first(number, index):
                continue
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
            kept.append(index)
        return kept

    def _is_first(self, number: int, index: int) -> bool:
        return not any(holdings.has_parameter(index) for holdings in self._holdings[:number])

    @torch.no_grad()
    def _take_gradients(self, number: int, touched: Sequence[int]) -> None:
        """Gradients of tied weights are added up in the order of the stages."""
        parameters = self._tensors.parameters
        for index in touched:
            view, parameter = self._gradients[number][index].view, parameters[index]
            if self._is_first(number, index):
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.add_(view)

    def evaluate(self, inputs: Sequence[torch.Tensor], count: int) -> Any:
        """The output of the last stage."""
        self._check_in_turn()
        self._follow_moves()
        self._tell_modes()
        self._randomness.settle()
        key = self._kind_of(inputs, count, trains=False)
        with self._in_turn():
            for process in self._processes:
                self._send(process, Evaluate(key))
            output = self._together(lambda: self._engine.evaluate(key, inputs))
            last = (self._count - 1) % self._size
            for number, process in enumerate(self._processes, 1):
                answer = self._answer(process, Evaluated)
                self._randomness.hear(number, answer.random)
                if number == last:
                    output = self._together(lambda said=answer: self._receive(last, said))  # type: ignore[misc]
        return output

    def _receive(self, source: int, said: Evaluated) -> Any:
        tensors = [empty(meta) for meta in said.outputs]
        for tensor in tensors:
            self._group.receive(tensor, source)
        return tuple(tensors) if said.is_tuple else tensors[0]
