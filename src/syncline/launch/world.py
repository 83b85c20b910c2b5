"""The processes that torchrun, mpirun or srun has started, and which of them this one is. Pure: a mapping in."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class StartedRanks(msgspec.Struct, frozen=True, kw_only=True):
    """Several processes started together. Each is a rank; rank k is worker-k of their job."""

    launcher: str  #: torchrun, mpirun, srun
    rank: int
    size: int
    local_size: int = 0  #: ranks on this host; 0: not known
    address: str = ""  #: the host of rank 0; empty: not known
    run: str = ""  #: tells this start from others of the same program, and is the same in all its ranks
    found: str = ""  #: the variables that say so: WORLD_SIZE=3 RANK=1
    is_here: bool = False  #: all ranks are on this host
    restarts: str = ""  #: what happens to the others when a rank dies, in words

    def describe(self, rank: int) -> str:
        return f"rank {rank} of {self.launcher}"


class _Launcher(msgspec.Struct, frozen=True):
    """One way to start ranks: the names of its variables. `size` and `rank` must be set, and `marks`."""

    name: str
    size: str
    rank: str
    marks: tuple[str, ...] = ()
    local_size: str = ""
    num_hosts: str = ""
    hosts: str = ""  # the names of the hosts, rank 0's first
    run: tuple[str, ...] = ()
    restarts: str = ""


_TORCHRUN = _Launcher(
    "torchrun",
    "WORLD_SIZE",
    "RANK",
    ("TORCHELASTIC_RUN_ID",),
    "LOCAL_WORLD_SIZE",
    run=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    restarts="torchrun restarts all ranks together, as often as its --max-restarts says",
)
_ALL_END = "all ranks end together"
#: torchrun comes first: mpirun or srun may have started it. mpirun may start its own processes by srun.
LAUNCHERS = (
    _TORCHRUN,
    msgspec.structs.replace(
        _TORCHRUN, name="a launcher like torchrun", marks=("LOCAL_RANK",), run=("MASTER_ADDR", "MASTER_PORT"),
        restarts=_ALL_END,
    ),
    _Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        (),
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        run=("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
        restarts=_ALL_END,
    ),
    _Launcher("mpirun", "PMI_SIZE", "PMI_RANK", (), "MPI_LOCALNRANKS", run=("SLURM_JOB_ID",), restarts=_ALL_END),
    # A batch script of sbatch has SLURM_PROCID and SLURM_NTASKS too; only a step of srun has this number.
    _Launcher(
        "srun",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        (),
        num_hosts="SLURM_STEP_NUM_NODES",
        hosts="SLURM_STEP_NODELIST",
        run=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        restarts=_ALL_END,
    ),
)  # fmt: skip


def world_of(environment: Mapping[str, str], parent: int = 0) -> StartedRanks | None:
    """This process and the other ranks of its start; None if it was started alone.

    `parent`: the process that started it, and all ranks of this host. It tells starts apart where no variable does.
    """
    for launcher in LAUNCHERS:
        size, rank = _number(environment, launcher.size), _number(environment, launcher.rank)
        if size > 1 and rank >= 0 and all(environment.get(name) for name in launcher.marks):
            return _world(launcher, environment, size, rank, parent)
    return None


def _world(launcher: _Launcher, environment: Mapping[str, str], size: int, rank: int, parent: int) -> StartedRanks:
    local_size = max(0, _number(environment, launcher.local_size))
    if not local_size and _number(environment, launcher.num_hosts) == 1:
        local_size = size
    address = environment.get("MASTER_ADDR", "") or first_host(environment.get(launcher.hosts, ""))
    is_here = local_size == size or address in LOOPBACK
    names = [environment.get(name, "") for name in launcher.run]
    if is_here and not any(names):
        names.append(str(parent))
    return StartedRanks(
        launcher=launcher.name,
        rank=rank,
        size=size,
        local_size=local_size,
        address=address,
        run="|".join([launcher.name, *names]),
        found=f"{launcher.size}={size} {launcher.rank}={rank}",
        is_here=is_here,
        restarts=launcher.restarts,
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "") if name else ""
    return int(text) if text.isdecimal() and len(text) < 10 else -1


def first_host(names: str) -> str:
    """The first of Slurm's short list of hosts: n1 of `n[1-3,7]`, gpu01 of `gpu01,gpu02`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", names)
    return "" if found is None else f"{found[1]}{found[2] or ''}{found[3] if found[2] else ''}"
