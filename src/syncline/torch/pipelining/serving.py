"""A stage process after its Pipeline is made: it does what its leader says."""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn

import torch
import torch.distributed

from syncline.core.stages import num_parts
from syncline.errors import ConfigError, ConnectionLost
from syncline.torch.pipelining.cutting import Layers, digest
from syncline.torch.pipelining.deferred import forget
from syncline.torch.pipelining.engine import LossFunction, StageEngine, as_tuple, describe, empty, infer
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
    PrepareBatches,
    Ready,
    ShareTensors,
    Stepped,
    TrainStep,
)
from syncline.torch.pipelining.shared import MappedBlocks
from syncline.worker.stages import StageJob

dist: Any = torch.distributed  # its types are incomplete
#: For the leader to learn first who has ended, when a connection to another stage breaks.
_LAST_SECONDS = 60.0


def serve(job: StageJob, layers: Layers, loss_fn: LossFunction) -> NoReturn:
    """Does what the leader says until it is gone; never returns."""
    try:
        cut, _ = job.place.channel.receive(Cut)
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
        if isinstance(error, RuntimeError) and "gloo" in str(error):
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
        parts = layers.parts(cut.firsts)
        own = {number: parts[number] for number in range(self._number, count, self._size)}
        self._engine = StageEngine(own, count, loss_fn, job.config.schedule)
        self._tensors = Tensors(layers.model)
        self._holdings = Holdings(self._tensors, list(own.values()))
        self._holdings.materialise()
        forget()
        self._all_modules = list(layers.model.modules())
        self._blocks = MappedBlocks()
        self._has_joined = False
        self._gradients: dict[int, torch.Tensor] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._touched: set[int] = set()
        self._output: tuple[torch.Tensor, ...] = ()
        for index in self._holdings.parameters:
            parameter = self._tensors.parameters[index]
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._touched.add(index))
        # Else all stages of all pipelines would draw the same numbers.
        torch.manual_seed((torch.initial_seed() + self._number + 1009 * job.rank) % (1 << 63))

    def obey(self, order: Order, fds: list[int]) -> Answer | None:
        if isinstance(order, ShareTensors):
            return self._share(order, fds)
        if isinstance(order, Infer):
            return Inferred(infer(self._engine.parts[order.part], order.inputs, order.autocast))
        if isinstance(order, PrepareBatches):
            self._engine.prepare(order)
        elif isinstance(order, Modes):
            for module, training in zip(self._all_modules, order.training, strict=True):
                module.training = training
        elif isinstance(order, TrainStep):
            return self._step(order)
        elif isinstance(order, Evaluate):
            return self._evaluate(order)
        return None

    def follow_up(self) -> None:
        """What comes behind an answer."""
        if not self._has_joined:
            self._has_joined = True
            self._engine.join(self._number, self._size, self._job.place.store_fd, self._job.config.wait_seconds)
        for tensor in self._output:
            dist.send(tensor.contiguous(), 0)
        self._output = ()

    def _share(self, order: ShareTensors, fds: list[int]) -> Answer:
        self._blocks.add(order.blocks, fds)
        parameters = self._tensors.parameters
        views = {place.index: self._blocks.view(place, parameters[place.index]) for place in order.parameters}
        fills = set(order.fills)
        self._tensors.move({index: view for index, view in views.items() if index in fills}, fill=True)
        self._tensors.move({index: view for index, view in views.items() if index not in fills}, fill=False)
        if order.buffers:
            buffers = self._tensors.buffers
            self._buffers = {place.index: self._blocks.view(place, buffers[place.index]) for place in order.buffers}
            self._tensors.move_buffers(self._buffers, fill=True)
        if order.gradients:
            self._gradients = {p.index: self._blocks.view(p, parameters[p.index]) for p in order.gradients}
        if not self._has_joined:  # at the first time: what this process does not compute with
            kept = set(self._holdings.parameters)
            for index, parameter in enumerate(parameters):
                if index not in kept and not parameter.is_meta:
                    parameter.data = torch.empty(0, dtype=parameter.dtype)
        self._blocks.drop(order.drops)
        return Ready()

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
            dist.recv(target, 0)
        loss = self._engine.step(order.key, (), target, order.scale)
        self._look_at_buffers()
        return Stepped(loss or 0.0, sorted(self._touched), self._engine.busy_seconds)

    def _look_at_buffers(self) -> None:
        """A module may have replaced a buffer's tensor, or its memory."""
        for index, view in self._buffers.items():
            buffer = self._tensors.buffers[index]
            if buffer.data_ptr() != view.data_ptr():
                view.copy_(buffer)
                buffer.data = view

    def _evaluate(self, order: Evaluate) -> Evaluated:
        output = self._engine.evaluate(order.key, ())
        if not self._engine.has_last:
            return Evaluated([])
        self._output = as_tuple(output)
        return Evaluated(describe(self._output), isinstance(output, tuple | list))
