"""What the workers of a job of `syncline bench` run: both sides of each row in turns, in the same processes.

The last worker measures; the first one is the far end of the links that are the floor. With several hosts the server
is on the first one too, so that both sides of a row use the same wire. The other workers take part in collectives and
training only.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np

import syncline
from syncline import collectives
from syncline.bench import links

#: A line of the measuring worker that begins with this is a row's figures.
MARK = "syncline-bench "
LEAST_PAIRS = 5
_MOST_OPERATIONS = 20_000

Operation = Callable[[], object]
Sides = tuple[Operation, Operation]


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure."""

    num_pairs: int = 9  #: turns of each side
    turn_seconds: float = 0.2
    row_seconds: float = 10.0  #: after this a row makes do with the pairs that it has, if they are LEAST_PAIRS


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers are told, as JSON on their command line."""

    rows: dict[str, int]  #: name -> bytes of an operation
    coordinator: str  #: its address: the way to it shows which address of a host the others can reach
    is_tls: bool = False
    on_one_host: bool = True
    effort: Effort = Effort()


class MeasuredFigures(msgspec.Struct, frozen=True):
    """Of one row: seconds per operation, turn by turn."""

    row: str
    ours: list[float]
    floor: list[float]


class Bench:
    """One worker's part in all rows."""

    def __init__(self, job: syncline.Job, told: Instruction) -> None:
        self._job, self._told = job, told
        self._is_far = job.rank == 0
        self.measures = job.rank == job.world_size - 1

    def sides(self, row: str, num_bytes: int, near: links.Near | None, far: links.Far | None) -> Sides:
        """What this worker does in a turn of ours, and in a turn of the floor."""
        if row == "step":
            return self._step()
        is_collective = row.startswith("all-reduce")
        ours = _all_reduce(num_bytes) if is_collective else self._push_pull(row, num_bytes)
        if row == "shm" or (row == "all-reduce" and self._told.on_one_host):
            return ours, _copies(num_bytes) if is_collective or self.measures else _nothing
        if near is not None:
            return ours, near.exchange
        return ours, partial(far.echo, num_bytes) if far is not None else _nothing

    def _push_pull(self, row: str, num_bytes: int) -> Operation:
        """By the worker that measures alone: the job is `async`."""
        kv, values = self._job.kv, {row: np.zeros(num_bytes // 4, np.float32)}
        kv.register(values, syncline.Rule("SGD", lr=1e-3))
        if not self.measures:
            return _nothing
        gradients = kv.gradients([row])
        gradients[row][...] = 1.0
        return lambda: kv.push_pull(gradients, out=values).wait()

    def _step(self) -> Sides:
        import torch
        from torch.nn import Linear, ReLU

        from syncline.torch import DistributedOptimizer

        device = self._job.device
        x, y = torch.randn(128, 784).to(device), torch.randint(10, (128,)).to(device)

        def step_of(*, is_ours: bool) -> Operation:
            layers = [Linear(784, 1024), ReLU(), Linear(1024, 1024), ReLU(), Linear(1024, 10)]
            model = torch.nn.Sequential(*layers).to(device)
            plain = torch.optim.Adam(model.parameters())
            optimizer = DistributedOptimizer(plain, model=model) if is_ours else plain

            def step() -> None:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                if loss.is_cuda:
                    torch.cuda.synchronize()

            return step

        return step_of(is_ours=True), step_of(is_ours=False)

    @contextlib.contextmanager
    def link(self, num_bytes: int) -> Iterator[tuple[links.Near | None, links.Far | None]]:
        """The near end in the worker that measures, the far end in the first one; all workers call this."""
        listening, said = None, np.empty(0, np.uint8)
        if self._is_far:
            listening = links.BenchListener(links.address_towards(self._told.coordinator), is_tls=self._told.is_tls)
            words = (listening.address, listening.port, listening.token)
            said = np.frombuffer(msgspec.json.encode(words), np.uint8).copy()
        said = collectives.broadcast(said if self._is_far else None, root=0)
        if listening is not None:
            with listening.accept() as far:
                yield None, far
        elif self.measures:
            address, port, token = msgspec.json.decode(said.tobytes(), type=tuple[str, int, str])
            with links.connect(address, port, token, num_bytes, is_tls=self._told.is_tls) as near:
                yield near, None
        else:
            yield None, None

    def play(self, row: str, sides: Sides) -> MeasuredFigures:
        """The sides in turns; which one is first alternates."""
        effort = self._told.effort
        taken: tuple[list[float], list[float]] = ([], [])
        began = time.monotonic()
        counts = self._counts(sides)
        for pair in range(effort.num_pairs):
            is_late = pair >= LEAST_PAIRS and time.monotonic() - began > effort.row_seconds
            if self._agree([is_late])[0]:
                break
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                taken[side].append(self._turn(sides[side], counts[side]))
        return MeasuredFigures(row, *taken)

    def _counts(self, sides: Sides) -> list[int]:
        """Operations of a turn of each side: the measuring worker finds out, and all workers make as many."""
        found = []
        for operation in sides:
            self._turn(operation, 2)
            seconds = max(self._turn(operation, 2), 1e-9)
            found.append(max(1, min(_MOST_OPERATIONS, round(self._told.effort.turn_seconds / seconds))))
        return self._agree(found)

    def _agree(self, numbers: list[int]) -> list[int]:
        """Those of the measuring worker, at all workers."""
        told = np.array(numbers, np.int64) if self.measures else None
        return [int(number) for number in collectives.broadcast(told, root=self._job.world_size - 1)]

    @staticmethod
    def _turn(operation: Operation, count: int) -> float:
        collectives.barrier()
        operation()  # warms the caches, which were the other side's
        began = time.perf_counter()
        for _ in range(count):
            operation()
        return (time.perf_counter() - began) / count


def _nothing() -> None:
    pass


def _all_reduce(num_bytes: int) -> Operation:
    numbers = collectives.empty(num_bytes // 4)
    return lambda: collectives.all_reduce_(numbers)


def _copies(num_bytes: int) -> Operation:
    one, two, three = (np.ones(num_bytes, np.uint8) for _ in range(3))

    def copy() -> None:
        np.copyto(two, one)
        np.copyto(three, two)

    return copy


def main(arguments: list[str]) -> None:
    told = msgspec.json.decode(arguments[0], type=Instruction)
    bench = Bench(syncline.init(), told)
    for row, num_bytes in told.rows.items():
        with bench.link(num_bytes) as (near, far):
            figures = bench.play(row, bench.sides(row, num_bytes, near, far))
            collectives.barrier()  # the far end stays until the last turn is over
        if bench.measures:
            sys.stdout.write(f"{MARK}{msgspec.json.encode(figures).decode()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
