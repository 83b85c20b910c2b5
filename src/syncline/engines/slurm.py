"""Slurm, in a step of srun (`srun syncline run train.py`): task 0 runs the launcher, other tasks are agents."""

from __future__ import annotations

import contextlib
import pathlib
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.core.units import counted
from syncline.engines.agent import Agent, AgentPlan
from syncline.engines.agents import Agents
from syncline.engines.hub import Hub
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.engine import Engine
from syncline.launch.forkserver import ForkServer
from syncline.launch.jobfile import JobFile
from syncline.launch.running import bound_host
from syncline.net import tcp

MEETING = "agents.json"
#: An agent that finds no launcher says so after this long, and again never.
NOTICE_SECONDS = 10.0
_AGAIN_SECONDS = 0.05
_MOST_HOSTS = 65_536


class SlurmStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of srun, and which of its tasks this process is."""

    job: str
    step: str
    restart: str  #: how often Slurm has requeued the job
    task: int
    host: str  #: this task's node
    hosts: dict[str, int]  #: the step's nodes in order, with their numbers of tasks
    num_gpus: int = 0  #: that the job has on this task's node

    @property
    def num_tasks(self) -> int:
        return sum(self.hosts.values())

    def has_gpus_per_task(self, num_visible: int) -> bool:
        """Whether Slurm has shared out this node's GPUs among its tasks, so that each sees its own only."""
        here = self.hosts.get(self.host, 1)
        return here > 1 and 0 < num_visible * here <= self.num_gpus

    @property
    def title(self) -> str:
        return f"Slurm job {self.job}"


def step_of(environment: Mapping[str, str]) -> SlurmStep | None:
    """The step that has started this process. None: no step has; a batch script or a shell of salloc has no task."""
    names = expand(environment.get("SLURM_STEP_NODELIST", ""))
    counts = expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    task, gpus = environment.get("SLURM_PROCID", ""), environment.get("SLURM_GPUS_ON_NODE", "")
    if not names or len(names) != len(counts) or not task.isdecimal():
        return None
    return SlurmStep(
        job=environment.get("SLURM_JOB_ID", ""),
        step=environment.get("SLURM_STEP_ID", ""),
        restart=environment.get("SLURM_RESTART_COUNT", "0"),
        task=int(task),
        host=environment.get("SLURMD_NODENAME", names[0]),
        hosts=dict(zip(names, counts, strict=True)),
        num_gpus=int(gpus) if gpus.isdecimal() else 0,
    )


def expand(text: str) -> list[str]:
    """Slurm's short list of hosts: `n[1-3,07],gpu01` is n1, n2, n3, n07, gpu01."""
    found: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", word):
            ends = [plain] if plain else _numbers(ranges)
            if len(names) * len(ends) > _MOST_HOSTS:
                raise ConfigError(f"Slurm's list of nodes has more than {_MOST_HOSTS} names: {text[:80]}")
            names = [name + end for name in names for end in ends]
        found += names
    return found


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return []
        if int(last or first) - int(first) >= _MOST_HOSTS:
            raise ConfigError(f"Slurm's list of nodes has more than {_MOST_HOSTS} names: [{ranges[:80]}]")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return found


def expand_counts(text: str) -> list[int]:
    """Slurm's short list of numbers: `2(x3),1` is 2, 2, 2, 1."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text):
        if int(times or 1) > _MOST_HOSTS:
            return []
        found += [int(count)] * int(times or 1)
    return found


def placed(launch: Mapping[str, Any], step: SlurmStep, num_visible: int = 0) -> dict[str, Any]:
    """The settings with the step's nodes as hosts: a worker per task, or as many as were said, spread over them.
    `num_visible`: GPUs that this task sees.
    """
    if launch.get("hosts"):
        raise ConfigError(f"-H {launch['hosts']} and a step of srun: its nodes are the hosts; leave out -H")
    stages = max(1, int(launch.get("stages") or 1))
    least, most = int(launch.get("least_workers") or 0), int(launch.get("most_workers") or 0)
    wanted = int(launch.get("workers") or 0) or step.num_tasks * stages
    if most:
        wanted = min(max(wanted, least), most)
    if wanted == step.num_tasks * stages:
        counts = {host: tasks * stages for host, tasks in step.hosts.items()}
    else:
        groups = wanted // stages
        shares = [groups // len(step.hosts) + (k < groups % len(step.hosts)) for k in range(len(step.hosts))]
        counts = {host: share * stages for host, share in zip(step.hosts, shares, strict=True) if share}
    known = {"workers": 0 if most else wanted, "hosts": ",".join(f"{host}:{count}" for host, count in counts.items())}
    if step.has_gpus_per_task(num_visible) and "device" not in launch:
        known["device"] = "cuda:0"  # each member sees its own only
    return {**launch, **known, **({} if launch.get("bind") else {"bind": address(step)})}


def address(step: SlurmStep) -> str:
    """Where this task listens for the others."""
    if len(step.hosts) == 1:
        return "127.0.0.1"
    for host in (*(host for host in step.hosts if host != step.host), "192.0.2.1"):
        with contextlib.suppress(OSError):
            family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)  # sends nothing; asks the routing table
                own = str(probe.getsockname()[0])
            if not tcp.is_loopback(own):
                return own
    raise ConfigError(f"cannot tell which address of {step.host} the other nodes reach; give it with --bind ADDRESS")


def meeting_folder(step: SlurmStep, runs: str) -> pathlib.Path:
    """Where the tasks of this step find each other: a folder that only their user can enter."""
    return pathlib.Path(runs) / f".slurm-{step.job}.{step.step}.{step.restart}"


@contextlib.contextmanager
def leading(step: SlurmStep, config: JobConfig, say: Callable[[str], None]) -> Iterator[Hub]:
    """Task 0: all other tasks of the step are there, as agents."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(tcp.bind(bound_host(config), 0))
        file = JobFile(
            job=secrets.token_hex(8), token=secrets.token_hex(32), host=str(sock.getsockname()[0]),
            port=int(sock.getsockname()[1]), given={"start_seconds": config.start_seconds},
        )  # fmt: skip
        hub = stack.enter_context(Hub(file, sock, say))
        _remove_stale(step, config.runs)
        stack.enter_context(_published(meeting_folder(step, config.runs), file))
        expected = {**step.hosts, step.host: step.hosts[step.host] - 1}  # this task is none
        hub.gather(expected, config.start_seconds)
        yield hub


def engine_of(step: SlurmStep, hub: Hub, fork_server: ForkServer | None) -> Engine:
    """Members on the nodes of this step; task 0 starts those of its own place itself."""
    return Agents(hub, step.title, own_host=step.host, fork_server=fork_server)


@contextlib.contextmanager
def _published(folder: pathlib.Path, file: JobFile) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be used: {error.strerror or error}; use --runs DIR") from None
    jobfile.write(folder / MEETING, file)
    try:
        yield
    finally:
        _remove(folder)


def follow(
    step: SlurmStep,
    config: JobConfig,
    lost: Callable[[], None],
    ended: Callable[[], int | None] = lambda: None,
    fork_server: ForkServer | None = None,
) -> int:
    """Every other task: an agent, until the job is over; the job's exit code. `lost`: is called when the launcher is
    gone without a word. `ended`: the exit code of a launcher that has given up before it came to the others.
    `fork_server`: for the agent.
    """
    path = meeting_folder(step, config.runs) / MEETING
    begun, said = time.monotonic(), False
    while not path.exists():
        if (code := ended()) is not None:
            return code
        waited = time.monotonic() - begun
        missing = (
            f"task {step.task} on {step.host} finds no {path.absolute()}, which task 0 writes; is the working folder "
            "on a disk that all nodes see? else say another one: --runs DIR"
        )
        if waited > config.start_seconds:
            raise ConfigError(missing)
        if waited > NOTICE_SECONDS and not said:
            said = True
            sys.stderr.write(f"syncline: {missing} (waits for {config.start_seconds:g} s)\n")
        time.sleep(_AGAIN_SECONDS)
    plan = AgentPlan(file=jobfile.read(path), host=step.host, number=step.task, preload=config.preload)
    agent = Agent(plan, fork_server)
    code = agent.run(config.start_seconds)
    if agent.has_lost_launcher:
        _remove(path.parent)
        lost()
    return code


def _remove(meeting: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        (meeting / MEETING).unlink(missing_ok=True)
        meeting.rmdir()


def _remove_stale(step: SlurmStep, runs: str) -> None:
    """What earlier starts of this job have left, whose launchers were killed."""
    for folder in pathlib.Path(runs).glob(f".slurm-{step.job}.*"):
        restart = folder.name.rpartition(".")[2]
        if restart.isdecimal() and step.restart.isdecimal() and int(restart) < int(step.restart):
            _remove(folder)


def warn_of_gpus(step: SlurmStep, num_visible: int) -> str:
    """Workers of a node share its GPUs, where Slurm has not shared them out; there may be too few."""
    here = step.hosts.get(step.host, 1)
    if 0 < num_visible < here and not step.has_gpus_per_task(num_visible):
        return (
            f"{step.host} has {counted(here, 'task')}, and each sees {counted(num_visible, 'GPU')}: too few for one "
            "each, so workers compute on the CPU; ask for as many GPUs as tasks, e.g. srun --gpus-per-task=1"
        )
    return ""
