"""The random numbers of stage processes: each process has a stream of its own, saved and restored as the leader's.

A stage process says its random states behind every batch that has drawn from them. So the leader knows them at any
time, also while another thread saves the script's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from syncline.errors import StoreError
from syncline.torch.pipelining.orders import Randomize, RandomStates
from syncline.worker.checkpoint import rng_state
from syncline.worker.checkpoint.encoding import Encoder, decode, from_json, to_json
from syncline.worker.checkpoint.script_state import Part
from syncline.worker.job import Job

_Python = tuple[int, tuple[int, ...], float | None]


def taken() -> RandomStates:
    """The states of this process's generators."""
    states, encoder = rng_state.take(), Encoder()
    python = msgspec.json.encode(states.pop("python"))
    tree = encoder.encode(states, "random states")
    return RandomStates(python, to_json(tree), [data.tobytes() for _, _, data in encoder.tensors])


def randomize(order: Randomize) -> None:
    """In a stage process: other states, or a seed."""
    if order.states is None:
        rng_state.seed_process(order.seed)
        return
    tensors = [np.frombuffer(data, np.uint8).copy() for data in order.states.tensors]
    states = decode(from_json(order.states.tree), tensors.__getitem__)
    rng_state.put_back({**states, "python": msgspec.json.decode(order.states.python, type=_Python)})


class StageRandomness:
    """The leader's view of them."""

    def __init__(self, job: Job, num_processes: int, send: Callable[[int, Randomize], None]) -> None:
        self._job, self._num_processes, self._send = job, num_processes, send
        self._known: dict[int, RandomStates] = {}  # by process, as it said last
        self._seeds: dict[int, int | None] = {}
        self._restored: list[RandomStates] | None = None  # not sent yet; empty: of another number of processes
        self._has_begun = False
        job.state.add_part("random states of stages", Part(self._take, self._put_back, is_own=True))

    def hear(self, number: int, states: RandomStates | None) -> None:
        """What a process says behind a batch; None: as before."""
        if states is not None:
            self._known[number] = states

    def settle(self) -> None:
        """Before a batch. What was saved goes on; a process for which nothing was saved gets numbers of its own.

        A worker that starts again in a running job, and has used `seed_everything`, gets a new stream, as everywhere.
        """
        restored, self._restored = self._restored, None
        is_first, self._has_begun = not self._has_begun, True
        stream, step = self._job.own_stream, self._job.life.step
        for number in range(1, self._num_processes):
            seed = stream.of_process(number)
            if restored and (seed is None or not stream.is_later_life):
                self._send(number, Randomize(states=restored[number - 1]))
            elif restored is not None or (is_first and step):
                begun = torch.initial_seed() if seed is None else seed
                self._send(number, Randomize(seed=_mixed(begun, number, self._job.rank, step)))
            elif seed is not None and seed != self._seeds.get(number):
                self._send(number, Randomize(seed=seed))
            self._seeds[number] = seed

    def _take(self) -> Any:
        if len(self._known) < self._num_processes - 1:
            return None  # some have drawn nothing yet: they begin as they did
        return [msgspec.structs.asdict(self._known[number]) for number in range(1, self._num_processes)]

    def _put_back(self, saved: Any) -> None:
        if type(saved) is not list:
            raise StoreError("the random states of stages cannot be read")
        fits = len(saved) == self._num_processes - 1
        self._restored = [_states_of(one) for one in saved] if fits else []
        self._known.clear()


def _states_of(saved: Any) -> RandomStates:
    try:
        return msgspec.convert([saved[name] for name in RandomStates.__struct_fields__], RandomStates)
    except (LookupError, TypeError, msgspec.ValidationError) as error:
        raise StoreError(f"the random states of a stage cannot be read: {error}") from None


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence([abs(number) for number in numbers]).generate_state(1, np.uint64)[0])
