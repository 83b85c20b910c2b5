"""`syncline status` without a job: lists running and ended jobs under runs/."""

from __future__ import annotations

import concurrent.futures
import pathlib
import time

import msgspec

from syncline.cli.standing import COLUMNS, duration
from syncline.core.membership import JobState
from syncline.core.units import counted
from syncline.core.wire.control import AskStatus, GivenStatus
from syncline.errors import ConfigError, SynclineError
from syncline.launch import jobfile
from syncline.launch.folder import JOB_FILE, JOURNAL, holder_of, job_folders
from syncline.launch.jobfile import JobFile
from syncline.launch.watching import ask
from syncline.stats import JobVerdict
from syncline.store import journal

#: Timeout for a running job's answer.
ANSWER_SECONDS = 1.5
#: Ended jobs listed, newest first.
MOST_ENDED = 20
_HEAD = ("job", "state", "since", "policy", "step", "")
_STEP = _HEAD.index("step")


class ListedJob(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list. Unknown values are empty."""

    name: str
    is_running: bool
    since: float  #: when it began, if it runs; else when it ended (wall clock)
    policy: str = ""
    step: int | None = None
    told: str = ""  #: how it ended, or why nothing is known


def list_jobs(runs: pathlib.Path, *, as_json: bool = False) -> str:
    """Running jobs first, each with its standings; then ended ones, newest first."""
    folders = job_folders(runs)
    running_folders = [folder for folder in folders if holder_of(folder)]
    files = [_job_file(folder) for folder in running_folders]  # in one thread: see net/handshake.py
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = sorted(pool.map(_running, running_folders, files), key=lambda job: -job.since)
    ended = sorted(
        (_ended(folder) for folder in folders if folder not in running_folders), key=lambda job: -job.since
    )
    if as_json:
        return msgspec.json.format(msgspec.json.encode([*running, *ended]), indent=2).decode()
    if not folders:
        return f"no jobs under {runs}/ (--runs DIR names another folder)"
    lines = _table([*running, *ended[:MOST_ENDED]])
    if len(ended) > MOST_ENDED:
        lines.append(f"and {len(ended) - MOST_ENDED} more that have ended (--json lists all)")
    return "\n".join(lines)


def _job_file(folder: pathlib.Path) -> JobFile | ConfigError:
    try:
        return jobfile.read(folder / JOB_FILE)
    except ConfigError as error:
        return error


def _running(folder: pathlib.Path, file: JobFile | ConfigError) -> ListedJob:
    try:
        if isinstance(file, ConfigError):
            raise file
        status = ask(file, AskStatus(), GivenStatus, ANSWER_SECONDS).status
    except SynclineError as error:
        why = str(error) if (folder / JOB_FILE).exists() else "it starts or ends now"
        return ListedJob(name=folder.name, is_running=True, since=_changed_at(folder), told=why)
    workers = counted(sum(member.role == "worker" for member in status.members), "worker")
    told = f"stopped by {status.stop}" if status.stop else workers
    return ListedJob(
        name=folder.name,
        is_running=True,
        since=time.time() - status.seconds,
        policy="ring" if status.exchange == "ring" else status.policy,
        step=status.step,
        told=status.verdict or "; ".join([told, *(verdict_told(verdict) for verdict in status.verdicts[:2])]),
    )


def verdict_told(verdict: JobVerdict) -> str:
    """A verdict in two words: straggler: worker-1."""
    return f"{verdict.kind}: {verdict.subject}" if verdict.subject else verdict.kind


def _ended(folder: pathlib.Path) -> ListedJob:
    since = _changed_at(folder)
    try:
        state = msgspec.msgpack.decode(journal.look(folder / JOURNAL) or b"", type=JobState)
    except msgspec.MsgspecError:  # missing, or of another version
        return ListedJob(name=folder.name, is_running=False, since=since, told="it is not known how it ended")
    outcome, stop = state.outcome, state.steering.stop
    told = "interrupted or killed" if outcome is None else ("failed: " if outcome.failed else "") + outcome.reason
    return ListedJob(
        name=folder.name,
        is_running=False,
        since=since,
        policy="ring" if state.config.is_ring else state.config.policy,
        step=state.num_steps,
        told=f"stopped by {stop}" if stop is not None and outcome is not None and not outcome.failed else told,
    )


def _changed_at(folder: pathlib.Path) -> float:
    """When the job last wrote anything."""
    found = [folder / JOURNAL, *folder.glob("*.log")]
    times = [path.stat().st_mtime for path in found if path.exists()]
    return max(times, default=folder.stat().st_mtime)


def _table(jobs: list[ListedJob]) -> list[str]:
    rows = [_HEAD, *(_row(job) for job in jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(width) if k == _STEP else cell.ljust(width) for k, (cell, width) in pairs]
        lines.append("  ".join(cells).rstrip())
    return [line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…" for line in lines]


def _row(job: ListedJob) -> tuple[str, ...]:
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.since))
    since = f"{at} ({duration(time.time() - job.since)})" if job.is_running else at
    step = "" if job.step is None else f"{job.step:,}"
    return (job.name, "running" if job.is_running else "ended", since, job.policy, step, job.told)
