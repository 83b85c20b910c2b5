"""Runs a script as it was before it was ported: each of Syncline's names means the line of torch that it replaced.

    python tests/scripts/plain.py tests/scripts/mnist.py --batch-size 32

The samples come in the job's order, since torch's own shuffling draws another one. Adam, AdamW and SGD use torch's
fused kernels, as the servers do. All else is plain torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import runpy
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data

from syncline.core.leasing.order import Order
from syncline.worker.checkpoint import rng_state


class Job:
    """What a script asks of a job, in one process without one."""

    name, rank, world_size, local_rank, is_chief = "worker-0", 0, 1, 0, True
    device = torch.device("cpu")
    should_stop = False

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self._counted: list[list[int]] = []
        self._stream = rng_state.OwnStream(self.name, 0)

    def begin(self) -> None:
        """Training begins: after seed_everything, which torch does not have, worker-0 draws from its own stream."""
        self._stream.begin()

    @property
    def step(self) -> int:
        return max((count for (count,) in self._counted), default=0)

    def steps(self, count: int) -> Iterator[int]:
        self.begin()
        return iter(range(count))

    def resume_at(self) -> int:
        return 0

    def barrier(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass

    def optimizer(self, opt: torch.optim.Optimizer, **_: Any) -> torch.optim.Optimizer:
        """The optimizer itself, whose steps are counted; by torch's fused kernels, as on a server."""
        if isinstance(opt, torch.optim.Adam | torch.optim.AdamW | torch.optim.SGD):
            for group in opt.param_groups:
                group["fused"], group["foreach"] = True, None
        count = [0]
        self._counted.append(count)

        def counted(*_: Any) -> None:
            count[0] += 1

        opt.register_step_pre_hook(lambda *_: self.begin())
        opt.register_step_post_hook(counted)
        opt.pull = opt.wait = lambda: None  # type: ignore[attr-defined]
        opt.no_sync = contextlib.nullcontext  # type: ignore[attr-defined]
        return opt


_job = Job()


class _InOrder(torch.utils.data.Sampler[int]):
    """The order of the job's loader: by its seed, else by that of the script at the first pass."""

    def __init__(self, num_samples: int, shuffle: bool, seed: int | None) -> None:
        self._num_samples, self._shuffle, self._seed, self._epoch = num_samples, shuffle, seed, 0

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[int]:
        if self._seed is None:
            found = torch.initial_seed()
            given = rng_state.last_given(found)
            self._seed = found if given is None else given
        order = Order(self._num_samples, self._seed, self._epoch, self._shuffle)
        self._epoch += 1
        return iter(order.at(np.arange(self._num_samples)).tolist())


class DataLoader(torch.utils.data.DataLoader[Any]):
    """torch's loader, in the order of the job's."""

    def __init__(
        self, dataset: Any, batch_size: int = 1, shuffle: bool = False, *, seed: int | None = None, **given: Any
    ) -> None:
        if not isinstance(dataset, torch.utils.data.IterableDataset):
            given["sampler"] = _InOrder(len(dataset), shuffle, seed)
        # torch's iterators draw a seed: from here, not from the script's generator.
        super().__init__(dataset, batch_size, generator=torch.Generator(), **given)

    def __iter__(self) -> Iterator[Any]:
        if torch.is_grad_enabled():
            _job.begin()
        return super().__iter__()

    def epochs(self, count: int) -> Iterator[int]:
        return iter(range(count))

    @property
    def total_steps(self) -> int:
        return len(self)


@contextlib.contextmanager
def _without_syncline() -> Iterator[None]:
    """While it lasts, `import syncline` gets the names above."""
    global _job
    job = _job = Job()
    rng_state.forget_seed()  # of another script in this process
    top, adapter = types.ModuleType("syncline"), types.ModuleType("syncline.torch")
    top.__dict__.update(init=lambda **_: job, seed_everything=rng_state.seed_everything, torch=adapter)
    adapter.__dict__.update(DataLoader=DataLoader, DistributedOptimizer=job.optimizer)
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "syncline"}
    for name in ours:
        del sys.modules[name]
    sys.modules.update({"syncline": top, "syncline.torch": adapter})
    try:
        yield
    finally:
        del sys.modules["syncline"], sys.modules["syncline.torch"]
        sys.modules.update(ours)


def run(script: pathlib.Path, arguments: Sequence[str] = ()) -> None:
    """The whole script, in this process."""
    argv, sys.argv = sys.argv, [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        with _without_syncline():
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = argv
        sys.path.remove(str(script.parent))


def result_of(script: pathlib.Path, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """What it prints as its result; on one thread, as the scripts of a job."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run(script, arguments)
    finally:
        torch.set_num_threads(num_threads)
    (line,) = [line for line in printed.getvalue().splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


if __name__ == "__main__":
    run(pathlib.Path(sys.argv[1]), sys.argv[2:])
