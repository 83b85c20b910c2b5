"""A job's folder under runs/: one live job per name, its job file, its logs, its journal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import time
from collections.abc import Iterator

from syncline.config import JobConfig
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.jobfile import JobFile
from syncline.store.lines import EVENTS, METRICS, SPANS
from syncline.store.series import SERIES

JOB_FILE = "job.json"
JOURNAL = "journal.db"
#: What `syncline trace` makes.
TRACE = "trace.json"
LOCK = "lock"
#: Of a detached job: what its next launcher needs to know; its exit code, at the end.
DETACHED, EXIT_CODE = "detached.json", "exit-code"


@contextlib.contextmanager
def hold(config: JobConfig, *, keeps: bool = False) -> Iterator[pathlib.Path]:
    """Holds the job's folder exclusively. `keeps`: continues an earlier job of that name; otherwise its logs and
    journal are removed.
    """
    folder = pathlib.Path(config.runs) / config.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None
    with locked(folder, config.name):
        if not keeps:
            clear(folder)
        yield folder


def claim_name(runs: pathlib.Path, name: str) -> str:
    """This name, or the first free one of NAME-2, NAME-3, …; creates its folder. Concurrent starts get different
    names.
    """
    number = 1
    while True:
        found = name if number == 1 else f"{name}-{number}"
        try:
            (runs / found).mkdir(parents=True)
            return found
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _unusable(runs / found, error) from None


def _unusable(folder: pathlib.Path, error: OSError) -> ConfigError:
    return ConfigError(f"the folder {folder} cannot be used: {error.strerror or error}; use another: --runs DIR")


@contextlib.contextmanager
def locked(folder: pathlib.Path, name: str, inherited: int | None = None) -> Iterator[int]:
    """Holds the lock of a job's folder; its descriptor. Processes that inherit this hold the lock too.

    `inherited`: such a descriptor, of a process that held the lock before.
    """
    path = folder / LOCK
    try:
        descriptor = inherited if inherited is not None else _lock(path)
    except OSError as error:
        raise _unusable(folder, error) from None
    if descriptor is None:
        holder = holder_of(folder)
        raise ConfigError(
            f"the job {name} is running{f' (pid {holder})' if holder else ''}; end it, or choose another --name"
        )
    try:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        path.unlink(missing_ok=True)  # while it is still ours
        os.close(descriptor)


def _lock(path: pathlib.Path) -> int | None:
    """The locked file, or None if another process holds it. Checks that the path still means the locked file."""
    num_tries = 5  # readers hold it for a moment only
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BlockingIOError:
            num_tries -= 1
            if not num_tries:
                os.close(descriptor)
                return None
            time.sleep(0.02)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def holder_of(folder: pathlib.Path) -> int:
    """The process that runs the job of this folder; 0: none."""
    try:
        with open(folder / LOCK, "rb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                said = file.read(32).strip()
                return int(said) if said.isdigit() else -1
    except OSError:
        return 0
    return 0


_LINES = (METRICS, EVENTS, SPANS)
_OF_A_RUN = (
    *("*.log", "fault-*", f"{JOURNAL}*", JOB_FILE, f"{SERIES}*", TRACE, DETACHED, EXIT_CODE),
    *(name.replace(".jsonl", "*.jsonl") for name in _LINES),
)


def clear(folder: pathlib.Path) -> None:
    """Removes what an earlier job of this name has left."""
    try:
        for pattern in _OF_A_RUN:
            for old in folder.glob(pattern):
                old.unlink()
    except OSError as error:
        raise _unusable(folder, error) from None


@contextlib.contextmanager
def found_by_others(folder: pathlib.Path, file: JobFile) -> Iterator[None]:
    """Publishes the job file in the folder for the duration: `syncline status NAME` and others find the job by it."""
    path = folder / JOB_FILE
    jobfile.write(path, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_jobs(runs: pathlib.Path) -> list[str]:
    """The names of the running jobs under this folder."""
    found = sorted(path.parent.name for path in runs.glob(f"*/{LOCK}"))
    return [name for name in found if holder_of(runs / name)]


def job_folders(runs: pathlib.Path) -> list[pathlib.Path]:
    """The folders of all jobs under this one, running or ended."""
    try:
        folders = [path for path in runs.iterdir() if path.is_dir()]
    except OSError:
        return []
    return [
        path for path in folders if (path / JOURNAL).exists() or (path / LOCK).exists() or any(path.glob("*.log"))
    ]


def find_job(job: str, runs: pathlib.Path) -> JobFile:
    """Finds a job file: by the job's name under `runs`, or by path."""
    folder, path = runs / job, pathlib.Path(job)
    if "/" not in job and (folder / JOB_FILE).is_file():
        if holder_of(folder):
            return jobfile.read(folder / JOB_FILE)
        if (folder / DETACHED).exists():
            raise ConfigError(f"the job {job} has lost its launcher; syncline attach {job} starts another one")
        raise ConfigError(f"the job {job} does not run any more: its launcher was killed; {_others(runs)}")
    if path.is_file():
        return jobfile.read(path)
    if "/" not in job and folder in job_folders(runs):
        if holder_of(folder):
            raise ConfigError(f"the job {job} is starting or ending: try again")
        raise ConfigError(f"the job {job} has ended; its logs are in {folder}/; {_others(runs)}")
    raise ConfigError(f"no job {job} runs under {runs}/; {_others(runs)}")


def find_run(run: str, runs: pathlib.Path) -> pathlib.Path:
    """The folder of a run, running or ended: by its name under `runs`, or by path."""
    for folder in (runs / run, pathlib.Path(run)):
        if run and folder.is_dir():
            if any((folder / name).exists() for name in (JOURNAL, SERIES, EVENTS, METRICS, SPANS)):
                return folder
            if folder in job_folders(runs):
                raise ConfigError(f"the run {run} has kept nothing yet: it starts now, or has ended before it began")
            raise ConfigError(f"{folder}/ is a folder, but no run: none of a run's files is in it; {_others(runs)}")
    raise ConfigError(f"there is no run {run} under {runs}/; {_others(runs)}")


def _others(runs: pathlib.Path) -> str:
    names = running_jobs(runs)
    if names:
        return f"running now: {', '.join(names)}"
    ended = [path.name for path in sorted(job_folders(runs), key=lambda path: path.stat().st_mtime)]
    if not ended:
        return "none runs now (--runs DIR says another folder)"
    return f"none runs now; ended, the last one last: {', '.join(ended[-10:])}"
