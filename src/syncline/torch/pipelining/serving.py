"""A stage process after its Pipeline is made: it does what its leader says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NoReturn

import torch

from syncline.core.stages import num_parts
from syncline.errors import ConfigError, ConnectionLost
from syncline.torch.pipelining.cutting import Layers, digest
from syncline.torch.pipelining.deferred import forget
from syncline.torch.pipelining.engine import LossFunction, StageEngine, as_tuple, describe, empty, infer
from syncline.torch.pipelining.group import PipelineGroup, own_place
from syncline.torch.pipelining.holding import Tensors, UnwrittenBuffers, hollow, in_several, share_out
from syncline.torch.pipelining.lacking import naming_lack_of_memory
from syncline.torch.pipelining.orders import (
    Answer,
    Cut,
    Evaluate,
    Evaluated,
    Infer,
    Inferred,
    JoinGroup,
    Modes,
    Order,
    PrepareBatches,
    Randomize,
    RandomStates,
    Ready,
    Recut,
    ShareTensors,
    Stepped,
    TrainStep,
)
from syncline.torch.pipelining.randomness import randomize, taken
from syncline.torch.pipelining.shared import MappedBlocks
from syncline.worker.stages import StageJob

#: For the leader to learn first who has ended, when a connection to another stage breaks.
_LAST_SECONDS = 60.0


def serve(job: StageJob, find: Callable[[], Layers], loss_fn: LossFunction) -> NoReturn:
    """Does what the leader says until it is gone; never returns.

    The leader tells first if the model cannot be cut.
    """
    server = None
    try:
        cut, _ = job.place.channel.receive(Cut)
        layers = find()
        with naming_lack_of_memory(layers.model, job.place.num_processes):
            server = StageServer(job, layers, cut, loss_fn)
            while True:
                order, fds = job.place.channel.receive(Order)
                answer = server.obey(order, fds)
                if answer is not None:
                    job.place.channel.send(answer)
                    server.follow_up()
    except ConnectionLost:
        os._exit(0)
    except Exception as error:
        if server is not None and server.is_cut_off(error):
            time.sleep(_LAST_SECONDS)  # another process of this pipeline has ended, and this one does with its leader
        job.place.fail(error)


class StageServer:
    """One stage process."""

    def __init__(self, job: StageJob, layers: Layers, cut: Cut, loss_fn: LossFunction) -> None:
        if cut.digest != digest(layers.model):
            raise ConfigError(
                "Pipeline: this process has made another model than the first one of its pipeline; make "
                "the same model in every process"
            )
        self._job, place = job, job.place
        count, self._size, self._number = num_parts(job.config), place.num_processes, place.number
        self._group = PipelineGroup(self._number, self._size)
        self._count, self._layers, self._loss_fn = count, layers, loss_fn
        self._tensors = Tensors(layers.model)
        self._hooked: set[int] = set()
        self._gradients: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._touched: set[int] = set()
        self._output: tuple[torch.Tensor, ...] = ()
        self._said_random: RandomStates | None = None
        self._is_talking = False  # with other stages, or it is about to
        self._follow_cut(cut.firsts)
        self._holdings.materialise(self._tensors)
        forget()
        self._all_modules = list(layers.model.modules())
        self._blocks = MappedBlocks()
        self._has_shared = False
        # Else all stages of all pipelines would draw the same numbers.
        torch.manual_seed((torch.initial_seed() + self._number + 1009 * job.rank) % (1 << 63))

    def _follow_cut(self, firsts: list[int]) -> None:
        """What depends on where the model is cut."""
        self._firsts = firsts
        all_holdings = share_out(self._tensors, self._layers, firsts, self._size)
        self._holdings = all_holdings[self._number]
        own = range(self._number, self._count, self._size)
        schedule, activity = self._job.config.schedule, self._job.place.activity
        self._engine = StageEngine(own, self._count, self._loss_fn, schedule, activity, self._group)
        own_buffers = set(self._holdings.buffers)
        self._unwritten = UnwrittenBuffers(
            self._tensors, [index for index in in_several(all_holdings) if index in own_buffers]
        )

    def obey(self, order: Order, fds: list[int]) -> Answer | None:
        self._is_talking = isinstance(order, JoinGroup | TrainStep | Evaluate)
        if isinstance(order, ShareTensors):
            return self._share(order, fds)
        if isinstance(order, Infer):
            part = self._layers.parts(self._firsts, order.batch)[order.part]
            return Inferred(infer(part, order.inputs, order.autocast))
        if isinstance(order, Recut):
            self._recut(order.firsts)
        elif isinstance(order, PrepareBatches):
            self._engine.prepare(order, self._layers.parts(self._firsts, order.boundaries[0]))
        elif isinstance(order, JoinGroup):
            self._group.join(order.ranks, self._job.place.store_fd, self._job.config.wait_seconds)
        elif isinstance(order, Modes):
            for module, training in zip(self._all_modules, order.training, strict=True):
                module.training = training
        elif isinstance(order, Randomize):
            randomize(order)
            self._said_random = None
        elif isinstance(order, TrainStep):
            return self._step(order)
        elif isinstance(order, Evaluate):
            return self._evaluate(order)
        return None

    def is_cut_off(self, error: Exception) -> bool:
        """Whether this is a connection to another stage that broke, and no word of the script's own code."""
        return (
            self._is_talking
            and not self._engine.has_failed
            and isinstance(error, RuntimeError)
            and "gloo" in str(error)
        )

    def follow_up(self) -> None:
        """What comes behind an answer."""
        for tensor in self._output:
            self._group.send(tensor.contiguous(), 0)
        self._output = ()

    def _share(self, order: ShareTensors, fds: list[int]) -> Answer:
        self._blocks.add(order.blocks, fds)
        parameters, buffers = self._tensors.parameters, self._tensors.buffers
        views = {place.index: self._blocks.view(place, parameters[place.index]) for place in order.parameters}
        fills = set(order.fills)
        self._tensors.move({index: view for index, view in views.items() if index in fills}, fill=True)
        self._tensors.move({index: view for index, view in views.items() if index not in fills}, fill=False)
        found = {place.index: self._blocks.view(place, buffers[place.index]) for place in order.buffers}
        fills = set(order.fills_buffers)
        self._tensors.move_buffers({index: view for index, view in found.items() if index in fills}, fill=True)
        self._tensors.move_buffers({index: view for index, view in found.items() if index not in fills}, fill=False)
        self._buffers.update(found)
        self._gradients.update({p.index: self._blocks.view(p, parameters[p.index]) for p in order.gradients})
        if not self._has_shared:  # at the first time
            self._has_shared = True
            self._leave()
        self._hook()
        self._blocks.drop(order.drops)
        self._unwritten.note()
        return Ready(own_place())

    def _recut(self, firsts: list[int]) -> None:
        self._follow_cut(firsts)
        held, held_buffers = set(self._holdings.parameters), set(self._holdings.buffers)
        self._gradients = {index: view for index, view in self._gradients.items() if index in held}
        self._buffers = {index: view for index, view in self._buffers.items() if index in held_buffers}
        self._leave()

    def _leave(self) -> None:
        """Lets go of what this process does not compute with."""
        held, held_buffers = set(self._holdings.parameters), set(self._holdings.buffers)
        for index, parameter in enumerate(self._tensors.parameters):
            if index not in held and not parameter.is_meta:
                parameter.grad, parameter.data = None, hollow(parameter)
        for index, buffer in enumerate(self._tensors.buffers):
            if index not in held_buffers and not buffer.is_meta:
                buffer.data = hollow(buffer)

    def _hook(self) -> None:
        """Notes which parameters get gradients."""
        for index in self._holdings.parameters:
            parameter = self._tensors.parameters[index]
            if parameter.requires_grad and index not in self._hooked:
                self._hooked.add(index)
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._touched.add(index))

    def _step(self, order: TrainStep) -> Stepped:
        keeps = set(order.keeps)
        parameters = self._tensors.parameters
        self._touched.clear()
        for index, view in self._gradients.items():
            if index not in keeps:
                view.zero_()
            parameters[index].grad = view
        target = None
        if self._engine.has_last:
            target = empty(order.target)
            self._group.receive(target, 0)
        loss = self._engine.step(order.key, (), target, order.scale)
        self._look_at_buffers()
        self._unwritten.check()
        return Stepped(loss or 0.0, sorted(self._touched), self._engine.spans, self._changed_random())

    def _changed_random(self) -> RandomStates | None:
        """The random states, if the leader does not know them."""
        states = taken()
        if states == self._said_random:
            return None
        self._said_random = states
        return states

    def _look_at_buffers(self) -> None:
        """A module may have replaced a buffer's tensor, or its memory."""
        buffers = self._tensors.buffers
        for index, view in self._buffers.items():
            buffer = buffers[index]
            if buffer.numel() and buffer.data_ptr() != view.data_ptr():
                view.copy_(buffer)
                buffer.data = view

    def _evaluate(self, order: Evaluate) -> Evaluated:
        output = self._engine.evaluate(order.key, ())
        if not self._engine.has_last:
            return Evaluated([], random=self._changed_random())
        self._output = as_tuple(output)
        return Evaluated(describe(self._output), isinstance(output, tuple | list), self._changed_random())
