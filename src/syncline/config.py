"""What a job can be told, and the only place that reads the environment.

What is said at launch wins over `syncline.toml`, which wins over what the script passes to `init`, which wins
over the defaults below.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from syncline.errors import ConfigError

TRANSPORTS = ("auto", "shm", "tcp")
EXCHANGES = ("servers", "ring")
SUMS = ("ours", "gloo", "nccl")
WEIGHTS = ("count", "ignore")
#: Said at launch or in syncline.toml only: a script cannot know on how many processes it will run.
LAUNCH_ONLY = frozenset(
    {
        "workers",
        "stages",
        "servers",
        "hosts",
        "server_hosts",
        "remote",
        "env",
        "preload",
        "name",
        "bind",
        "page",
        "page_host",
        "sink",
        "profile",
        "trace",
        "runs",
        "server_device",
        "sums",
        "trust_network",
        "least_workers",
        "most_workers",
        "replicas",
        "ack",
        "max_restarts",
        "fresh",
        "resume",
        "checkpoint_mirror",
        "save_memory",
        "save_seconds",
    }
)


#: The least and the most of each number. A server keeps 1,024 slots per worker; a thread cannot wait for ever.
LIMITS: Mapping[str, tuple[float, float]] = {
    "workers": (1, 65_536),
    "stages": (0, 1_024),
    "micro_batches": (1, 65_536),
    "servers": (1, 65_536),
    "least_workers": (0, 65_536),
    "most_workers": (0, 65_536),
    "replicas": (0, 65_536),
    "max_restarts": (0, 1 << 40),
    "save_memory": (0, 1 << 44),
    "save_seconds": (0.0, 1e9),
    "keep": (2, 1 << 40),
    "max_steps": (0, 1 << 60),
    "beat_seconds": (1e-3, 1e9),
    "deadline_seconds": (1e-3, 1e9),
    "longest_deadline_seconds": (1e-3, 1e9),
    "suspect_seconds": (0.01, 1e9),
    "stuck_seconds": (1e-3, 1e9),
    "coordinator_seconds": (0.0, 1e9),
    "leave_seconds": (1e-3, 1e9),
    "follower_seconds": (0.0, 1e9),
    "sync_every": (1, 1 << 40),
    "pull_every": (1, 1 << 40),
    "window": (0, 1023),
    "bad_pushes": (1, 1 << 40),
    "slice_bytes": (64, 1 << 40),
    "start_seconds": (1e-3, 1e9),
    "wait_seconds": (1e-3, 1e9),
}


class JobConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one job, one line of meaning each."""

    workers: int = 1  #: number of workers, at the start
    least_workers: int = 0  #: begins and goes on with as few; 0: all of them at the start
    most_workers: int = 0  #: may grow to as many; 0: no more than at the start
    auto_workers: bool = False  #: add and retire workers by what each adds in samples/s
    stages: int = 1  #: processes of a pipeline, which is one worker: each has a part of the model; auto (0): planned
    micro_batches: int | Literal["auto"] = "auto"  #: of a pipeline's batch; auto: four per stage
    schedule: str = "1f1b"  #: the order of forwards and backwards in a pipeline: gpipe, 1f1b, interleaved
    servers: int = 1  #: number of servers
    replicas: int = 0  #: servers that have each slice: 1, 2; 0: 2 when servers are on several hosts, else 1
    ack: str = ""  #: when a push is acknowledged: memory (its server has it), replicated (two have it)
    max_restarts: int = 3  #: of a member that dies without an acknowledged push in between
    beat_seconds: float = 0.25  #: between two signs of life of a member
    deadline_seconds: float = 2.0  #: of silence, at least, before a member counts as dead
    longest_deadline_seconds: float = 10.0  #: the same for a member that is often late, or has made no step yet
    suspect_seconds: float = 0.3  #: for a member whose connection broke to come back
    stuck_seconds: float = 600.0  #: others wait for a member that lives and does not advance, then it is evicted
    coordinator_seconds: float = 60.0  #: for a coordinator that is gone to come back
    leave_seconds: float = 60.0  #: for a server that leaves to hand over its slices
    follower_seconds: float = 5.0  #: for followers (serve --follow) to read the last step when all scripts have ended
    policy: str = "sync"  #: when updates are applied: sync, sync:spare=N, bounded:K, async, async:gather=N
    weights: str = "count"  #: in bounded and async: count: a push is scaled by its weight; ignore: all count the same
    lr_per_worker: bool = False  #: in sync: each gradient counts by its own worker's learning rate
    aggregate: str = ""  #: in sync: mean, sum, median, trimmed:0.25, norm-clipped:C, package.module:name
    exchange: str = "servers"  #: how gradients become new parameters: servers; ring: every worker has a server
    sums: str = "ours"  #: in a ring, what adds up gradients: ours; gloo or nccl, through torch.distributed
    trust_network: bool = False  #: gloo and nccl may speak in the clear between hosts, and to anyone
    sync_every: int | Literal["auto"] = 1  #: push the change of so many local steps; auto: by the time spent waiting
    outer: str = ""  #: with sync_every: the optimizer that takes the average, on the servers: SGD(lr=0.7, …)
    codec: str = ""  #: how pushes travel over sockets: bf16, fp16, int8, topk:0.01, package.module:name; none
    pull_codec: str = ""  #: the same for the parameters that answer a push, in a ring for sums; not topk
    codec_exempt: str = ""  #: names of parameters that are never encoded: *.bias,norm*
    pull_every: int = 1  #: push in every step, take new parameters in every P-th only (bounded, async)
    window: int = 0  #: commits of its own that a worker may leave unanswered (bounded, async)
    check_finite: bool = True  #: refuse pushes with NaN or Inf in them
    bad_pushes: int = 3  #: so many refused in a row quarantine their worker: it only pulls
    transport: str = "auto"  #: shm: same host only; tcp: sockets even on one host; auto: the best there is
    device: str = "auto"  #: auto: cuda:LOCAL_RANK when there are enough GPUs, else cpu
    server_device: str = "cpu"  #: where servers hold slices and run rules: cpu, cuda, cuda:0, …
    name: str = ""  #: name of the job and of its folder under runs/
    bind: str = ""  #: address[:port] on which the coordinator listens
    page: str = "auto"  #: the web page: auto (loopback, where its extra is installed), off, [ADDRESS:]PORT
    page_host: tuple[str, ...] = ()  #: names by which browsers ask for the page through a proxy
    sink: tuple[str, ...] = ()  #: where metrics go besides: tensorboard (where installed), mlflow://…, or off
    hosts: str = ""  #: a:4,b:4 — workers per host
    server_hosts: str = ""  #: a,b — hosts of servers, in turn; those of workers if not said
    remote: str = "ssh {host}"  #: command prefix that starts a process on a host
    cores: str = ""  #: auto: every member of a host gets cores of its own, and as many threads
    preload: bool = True  #: members of this host are forked from one process that has loaded torch (Linux)
    env: str = ""  #: torchrun: also set RANK, WORLD_SIZE, … for scripts that read them
    profile: bool = False  #: at the end, show where the time of the steps went
    trace: bool = False  #: keep when each phase of every step began and ended, for `syncline trace`
    runs: str = "runs"  #: folder that holds one folder per job
    slice_bytes: int = 4 << 20  #: about how large a slice is
    checkpoint: str = ""  #: folder (any fsspec path) for checkpoints; one that it holds is taken up
    save_every: str = ""  #: how often to save: 10m, 500steps
    save_memory: int = 0  #: bytes that a server may copy for a save, then updates wait; 0: as many as its slices have
    save_seconds: float = 30.0  #: for the save when a whole job is told to end
    fresh: bool = False  #: start over beside what the checkpoint folder holds
    resume: str = ""  #: another checkpoint, or folder of such, to start from
    keep: int = 3  #: checkpoints to keep, the newest; the best are kept besides
    checkpoint_mirror: str = ""  #: folder (any fsspec path) for a second copy of every checkpoint
    best: str = ""  #: metric by which the best checkpoint is kept: accuracy, loss, min:NAME, max:NAME
    average: str = ""  #: merged weights as a candidate for the best: last:N, ema:DECAY
    stop: tuple[str, ...] = ()  #: rules to stop by: accuracy>=0.9, loss.plateau(5)
    on_plateau: str = ""  #: what is tried when a plateau is reached, before its rule stops the job: lr*0.1
    max_steps: int = 0  #: steps of the job; 0: as many as its script makes
    max_time: str = ""  #: time of training: 90s, 2h; with what was trained before it was taken up
    start_seconds: float = 120.0  #: deadline for all members to be there
    wait_seconds: float = 600.0  #: deadline of every other wait

    @property
    def is_ring(self) -> bool:
        """Whether every worker's process has a server in it, which has every slice."""
        return self.exchange == "ring"

    @property
    def steps_locally(self) -> bool:
        """Whether workers make local steps between two pushes."""
        return self.sync_every != 1

    @property
    def has_process_group(self) -> bool:
        """Whether torch.distributed adds up gradients, among the servers of a ring."""
        return self.is_ring and self.sums != "ours"


_FIELDS = {field.name: field.type for field in msgspec.structs.fields(JobConfig)}


def check_known(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The same values with their types made right; unknown names and wrong types name their source."""
    checked = {}
    for key, value in values.items():
        if key not in _FIELDS:
            known, near = ", ".join(sorted(_FIELDS)), difflib.get_close_matches(key, _FIELDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{source}: unknown setting {key!r}; choose from: {known}{hint}")
        if key in ("stop", "sink", "page_host") and isinstance(value, str):
            value = (value,)  # one needs no list
        if key == "stages" and value == "auto":
            value = 0
        if key == "sync_every" and isinstance(value, str) and value != "auto":
            raise ConfigError(f"{source}: sync_every = {value!r}: must be a number of steps, or auto")
        if key == "micro_batches" and isinstance(value, str) and value != "auto":
            raise ConfigError(f"{source}: micro_batches = {value!r}: must be a number, or auto")
        try:
            checked[key] = msgspec.convert(value, _FIELDS[key], strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{source}: {key} = {value!r}: {error}") from None
    return checked


def resolve(*layers: Mapping[str, Any]) -> JobConfig:
    """One config of several layers of settings, the strongest first, checked field by field."""
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged.update(layer)
    config = JobConfig(**merged)
    _check_values(config)
    return config


def _check_values(config: JobConfig) -> None:
    for name, (least, most) in LIMITS.items():
        value = getattr(config, name)
        if value == "auto":
            continue
        if not value >= least:
            raise ConfigError(f"{name} = {value}: must be at least {least}")
        if value > most:
            raise ConfigError(f"{name} = {value}: must be at most {most:.15g}")
    if config.transport not in TRANSPORTS:
        raise ConfigError(f"transport = {config.transport!r}: must be one of {', '.join(TRANSPORTS)}")
    if config.exchange not in EXCHANGES:
        raise ConfigError(f"exchange = {config.exchange!r}: must be one of {', '.join(EXCHANGES)}")
    if config.sums not in SUMS:
        raise ConfigError(f"sums = {config.sums!r}: must be one of {', '.join(SUMS)}")
    if config.weights not in WEIGHTS:
        raise ConfigError(f"weights = {config.weights!r}: must be one of {', '.join(WEIGHTS)}")
    if config.replicas > 2 and not config.is_ring:
        raise ConfigError(f"replicas = {config.replicas}: must be at most 2")
    kind, colon, number = config.server_device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and number.isdecimal() and len(number) < 4)):
        raise ConfigError(f"server_device = {config.server_device!r}: must be one of cpu, cuda, cuda:0, cuda:1, …")
    if config.cores not in ("", "auto"):
        raise ConfigError(f"cores = {config.cores!r}: must be auto")
    if config.env not in ("", "torchrun"):
        raise ConfigError(f"env = {config.env!r}: must be torchrun")
    if "/" in config.name or config.name in (".", "..") or not config.name.isprintable():
        raise ConfigError(f"name = {config.name!r}: it is also the name of a folder, and must not contain '/'")
    if len(config.name.encode()) > 200:
        raise ConfigError(f"name = {config.name[:20]!r}…: it is also the name of a folder: at most 200 bytes")


def read_toml_here() -> dict[str, Any]:
    """The settings of `syncline.toml` in the working folder."""
    return read_toml(pathlib.Path.cwd())


def read_toml(folder: pathlib.Path) -> dict[str, Any]:
    """The settings of `syncline.toml` in this folder; none when there is no such file."""
    path = folder / "syncline.toml"
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    return check_known(values, str(path))


def data_folder() -> str | None:
    """Where the user said that data sets lie: `$SYNCLINE_DATA`."""
    return os.environ.get("SYNCLINE_DATA") or None


def fault() -> str:
    """What a test wants to happen to a member of this job: `$SYNCLINE_FAULT`."""
    return os.environ.get("SYNCLINE_FAULT", "")


def cache_folder() -> pathlib.Path:
    """The user's cache folder for Syncline, by the XDG rules; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "syncline"


def token_file() -> str:
    """The file with the secret of ranks that torchrun, mpirun or srun starts: `$SYNCLINE_TOKEN_FILE`."""
    return os.environ.get("SYNCLINE_TOKEN_FILE", "")


def given_job() -> str:
    """The job file of the job that these ranks join, where one was started by hand: `$SYNCLINE_JOB`."""
    return os.environ.get("SYNCLINE_JOB", "")


#: Settings for ranks, as JSON; `syncline worker-env` sets it.
SETTINGS = "SYNCLINE_SETTINGS"


def said_to_ranks() -> dict[str, Any]:
    """The settings that `syncline worker-env` was told: `$SYNCLINE_SETTINGS`."""
    text = os.environ.get(SETTINGS, "")
    try:
        values = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except msgspec.DecodeError as error:
        raise ConfigError(f"{SETTINGS}: {error}; syncline worker-env sets it") from None
    return check_known(values, SETTINGS)


def inherited_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process: ours, with some values added."""
    return {**os.environ, **extra}


def add_to_environment(extra: Mapping[str, str]) -> None:
    """Sets variables for libraries of this process that read them later (torchrun's, thread counts)."""
    os.environ.update(extra)


def num_given_sockets() -> int:
    """Listening sockets that a supervisor such as systemd gives this process, from descriptor 3 on: `$LISTEN_FDS`."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return 0  # they are a parent's
    said = os.environ.get("LISTEN_FDS", "")
    return int(said) if said.isascii() and said.isdigit() else 0


def num_gpus() -> int:
    """GPUs that a worker would see, found without loading a framework."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([word for word in visible.split(",") if word.strip() and word.strip() != "-1"])
    return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def environment_names(names: tuple[str, ...]) -> set[str]:
    """Which of these variables the user has set."""
    return {name for name in names if name in os.environ}


def num_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_to_cores(cores: list[int]) -> bool:
    """From now on this process runs on these cores only; False where the system does not let it."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        return False
    _own_cores[:] = cores
    return True


def leave_cores() -> None:
    """From now on this process may run on every core: another launcher has bound its parent to some."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))


_own_cores: list[int] = []


def own_cores() -> list[int]:
    """The cores that this process was given for itself; none: it shares them."""
    return list(_own_cores)


def cores_here() -> list[int]:
    """The numbers of the cores that this process may run on; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def num_threads() -> int:
    """How many threads this process may compute with: what the user or the launcher said, else one per core."""
    return said_threads() or num_cores()


def said_threads() -> int:
    """The number of threads that the environment names; 0: none."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(said) if said.isdecimal() else 0
