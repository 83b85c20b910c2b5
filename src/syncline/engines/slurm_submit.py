"""Submitting to Slurm: `syncline run --on slurm --nodes 4 train.py` writes a batch script and follows its job."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from syncline.engines.awake import AwakeClock
from syncline.errors import ConfigError

BATCH = "job.sh"
#: Where task 0 leaves the exit code of the job with this number.
EXIT_CODE = "exit-code"
#: Touched by the batch shell while it lives, so often; a shell that has not for so long is gone with its node.
BEAT, BEAT_SECONDS, SILENT_SECONDS = "alive", 5, 60.0
#: Between two looks at the queue; for one answer of Slurm; and for a controller that restarts to answer again.
LOOK_SECONDS, ANSWER_SECONDS, RESTART_SECONDS = 1.0, 60.0, 60.0
#: Between two tasks that look whether their job is empty; after so many turns the rest look at once.
TURN_SECONDS, MOST_TURNS = 2.0, 15
#: Between SIGTERM and the end of the time limit. Slurm sends signals up to a minute early: a limit that is to leave
#: time for steps is longer than both together.
WARN_SECONDS, LEAST_LIMIT_SECONDS = 120, 300
#: Where a job notes its starts, and how many in a row may save no step more than the one before.
STARTS, MOST_FRUITLESS = "starts", 3
#: Exit code of a launcher that SIGTERM has ended.
TERMINATED = 128 + signal.SIGTERM
#: What Slurm says of a job that its limits will never let start.
NEVER = frozenset({
    "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "AssociationJobLimit", "AssocMaxNodePerJobLimit",
    "QOSMaxNodePerUserLimit", "QOSMaxWallDurationPerJobLimit", "InvalidQOS", "InvalidAccount", "PartitionInactive",
    "PartitionDown", "DependencyNeverSatisfied",
})  # fmt: skip
#: What it says of a job that has ended long ago.
FORGOTTEN = "Invalid job id"
_OVER = frozenset({
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
})  # fmt: skip


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asks Slurm for."""

    hosts: int = 1
    gpus_per_host: int = 0
    cpus_per_host: int = 0  #: 0: whole nodes
    time: str = ""
    partition: str = ""
    requeue: bool = False  #: go on after the time limit, a preemption or the loss of the first node
    options: str = ""  #: more options of sbatch

    def check(self, *, saves: bool = False) -> None:
        """`saves`: the job has a checkpoint folder, and is told to save before its time limit."""
        if self.hosts < 1 or self.gpus_per_host < 0 or self.cpus_per_host < 0:
            raise ConfigError("--nodes must be 1 or more, --gpus-per-node and --cpus-per-node 0 or more")
        if self.time and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", self.time):
            raise ConfigError(f"--time {self.time!r}: give minutes, or days-hours:minutes:seconds, e.g. 2:00:00")
        if saves and 0 < limit_seconds(self.time) < LEAST_LIMIT_SECONDS:
            raise ConfigError(
                f"--time {self.time} with --checkpoint: Slurm tells the job {WARN_SECONDS // 60} to "
                f"{WARN_SECONDS // 60 + 1} minutes before the limit to save and end, and no time is left for steps; "
                f"give it --time {LEAST_LIMIT_SECONDS // 60} or more"
            )
        try:
            shlex.split(self.options)
        except ValueError as error:
            raise ConfigError(f"--engine-options {self.options!r}: {error}") from None


def limit_seconds(text: str) -> int:
    """The seconds of a time limit as `Wanted.check` takes it; 0: none."""
    days, has_days, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")] if rest else []
    if not has_days and len(parts) < 3:  # minutes, or minutes:seconds
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def batch_script(wanted: Wanted, name: str, folder: pathlib.Path, command: Sequence[str], *, saves: bool) -> str:
    """The script for sbatch: one task per node, which is an agent; the job's launcher runs in the first."""
    said = [
        f"--job-name={name}", f"--nodes={wanted.hosts}", "--ntasks-per-node=1", "--no-kill", "--open-mode=append",
        f"--output={output_of(folder, '%j')}", "--requeue" if wanted.requeue else "--no-requeue",
        f"--cpus-per-task={wanted.cpus_per_host}" if wanted.cpus_per_host else "--exclusive",
    ]  # fmt: skip
    said += [f"--gpus-per-node={wanted.gpus_per_host}"] if wanted.gpus_per_host else []
    said += [f"--time={wanted.time}"] if wanted.time else []
    said += [f"--partition={wanted.partition}"] if wanted.partition else []
    said += [f"--signal=TERM@{WARN_SECONDS}"] if saves else []
    said += shlex.split(wanted.options)
    alive = f'{shlex.quote(str(folder / BEAT))}."$SLURM_JOB_ID"'
    verdict = f'{shlex.quote(str(folder / EXIT_CODE))}."$SLURM_JOB_ID"'  # `exit_code_path`
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH {shlex.quote(word)}" for word in said),
        f"rm -f {verdict}",  # of an earlier run of a requeued job
        f"(while touch {alive} 2>/dev/null; do sleep {BEAT_SECONDS}; done) &",
        "beat=$!",
        f"{shlex.join(step_command(command))} &",
        "step=$!",
        # Slurm may send its signal to this shell too; the step has it, and ends by itself.
        "trap : TERM",
        "wait $step; code=$?",
        f"while kill -0 $step 2>/dev/null && [ $code -eq {TERMINATED} ]; do wait $step; code=$?; done",
    ]
    lines.append(f"kill $beat 2>/dev/null; rm -f {alive}")
    # Tasks of a lost host fail, however the job ends: its own exit code counts. Without one the launcher was killed.
    lines += [
        "why=",
        f"if [ -s {verdict} ]; then code=$(cat {verdict}); elif [ $code -gt 128 ]; then",
        '    why="has lost its launcher (exit code $code; 137: it was killed, perhaps for lack of memory)"',
        "fi",
        f'[ $code -eq {TERMINATED} ] && why="was told to end"',
    ]
    if wanted.requeue:
        # A job that was cancelled does not run any more; Slurm would requeue it all the same. A controller that
        # restarts answers later.
        lines += [
            'asked() { tries=12; until "$@"; do tries=$((tries - 1)); [ $tries -gt 0 ] || return 1; sleep 5; done; }',
            'if [ -n "$why" ]; then',
            '    case "$(asked scontrol --oneliner show job "$SLURM_JOB_ID")" in *JobState=RUNNING*)',
            '        echo "syncline: job $SLURM_JOB_ID $why; it is requeued and goes on from its checkpoint"',
            '        asked scontrol requeue "$SLURM_JOB_ID" ||',
            '            echo "syncline: Slurm does not requeue job $SLURM_JOB_ID; submit it again to go on";;',
            "    esac",
            "fi",
        ]
    return "\n".join([*lines, "exit $code", ""])


def output_of(folder: pathlib.Path, job: str) -> pathlib.Path:
    """What a job has shown."""
    return folder / f"slurm-{job}.out"


def step_command(command: Sequence[str]) -> list[str]:
    """A task per node; the job survives the loss of a task or of a node."""
    return ["srun", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", *command]


def leave_no_empty_job(
    folder: pathlib.Path, job: str, say: Callable[[str], None], *, turn: int, restart: str
) -> None:
    """In a task that has lost its launcher: where the first node is lost, with the batch shell, Slurm would keep the
    job running (`--no-kill`), with nothing in it. It is requeued, if it may be, else it ends. All other tasks come
    here too, each at its `turn`, and most of them find that it is done. `restart`: how often Slurm had requeued it.
    """
    clock, before = AwakeClock(), _beat(folder, job)
    while clock.seconds() < SILENT_SECONDS:
        if not before or _beat(folder, job) != before:
            return  # the shell lives, or has ended: it ends the job
        time.sleep(LOOK_SECONDS / 4)
    time.sleep(min(turn, MOST_TURNS) * TURN_SECONDS)
    known = ask_patiently(["scontrol", "--oneliner", "show", "job", job]).stdout
    if "JobState=RUNNING" not in known or f"Restarts={restart} " not in known:
        return
    if "Requeue=1" in known:
        say(f"the first node of job {job} is lost; the job is requeued and goes on from its checkpoint")
        ask_patiently(["scontrol", "requeue", job], is_final=_has_answered)
    else:
        say(f"the first node of job {job} is lost, and the job ends; --requeue lets it go on")
        ask_patiently(["scancel", job], is_final=_has_answered)


def _has_answered(said: str) -> bool:
    """Whether Slurm may have done what it was told: another task may have told it the same, and again is too much."""
    return "Unable to contact" not in said


class _Starts(msgspec.Struct):
    """What the starts of a job have found in its checkpoint folder."""

    step: int = 0  #: at the newest of them
    num_fruitless: int = 0  #: in a row, the newest of them included


def note_start(folder: pathlib.Path, job: str, restart: int, step: int) -> None:
    """At each start of a job that may be requeued. `step`: of its newest checkpoint. ConfigError: as many starts in a
    row have saved no step as may be, and it would go on like that for ever.
    """
    path, before = folder / f"{STARTS}.{job}", _Starts(step)
    if restart:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            before = msgspec.json.decode(path.read_bytes(), type=_Starts)
    is_fruitless = restart > 0 and step <= before.step
    now = _Starts(step, before.num_fruitless + 1 if is_fruitless else 0)
    path.write_bytes(msgspec.json.encode(now))
    if now.num_fruitless >= MOST_FRUITLESS:
        raise ConfigError(
            f"job {job} was requeued {now.num_fruitless} times in a row without a new step in its checkpoint (step "
            f"{step}), so it ends. Its output says what ended each start. A longer --time or a shorter --save-every "
            "helps; the same command goes on from the checkpoint"
        )


def exit_code_path(folder: pathlib.Path, job: str) -> pathlib.Path:
    return folder / f"{EXIT_CODE}.{job}"


def exit_code_of(folder: pathlib.Path, job: str) -> int | None:
    """What task 0 has left; None: nothing."""
    try:
        text = exit_code_path(folder, job).read_text()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _beat(folder: pathlib.Path, job: str) -> float:
    """When the batch shell has last said that it lives; 0: it has ended in order."""
    try:
        return (folder / f"{BEAT}.{job}").stat().st_mtime
    except OSError:
        return 0.0


def check_here() -> None:
    """Slurm's commands are installed; whether its controller answers shows when it is asked."""
    missing = [name for name in ("sbatch", "squeue", "scontrol", "scancel") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"--on slurm: {', '.join(missing)} not found; run this on a login node of the cluster, or load its module"
        )


def submit(script: pathlib.Path) -> str:
    """Hands the batch script to Slurm; the number of the job."""
    done = ask(["sbatch", "--parsable", str(script)])
    if done.returncode:
        raise ConfigError(f"Slurm does not take the job: {_first(done.stderr)}; sinfo shows what the cluster has")
    return done.stdout.strip().partition(";")[0]


def ask(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_SECONDS, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"Slurm's controller does not answer {command[0]} within {ANSWER_SECONDS:g} s; see scontrol ping"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"Slurm's command {command[0]} cannot be started here: {error.strerror or error}; load its module, or "
            "repair PATH"
        ) from None


def ask_patiently(
    command: Sequence[str], seconds: float = RESTART_SECONDS, is_final: Callable[[str], bool] = lambda _: False
) -> subprocess.CompletedProcess[str]:
    """Asks again for so long where there is no answer: the controller may be restarting. The last answer, which may
    be a failure. `is_final`: whether what Slurm says of a failure will not change.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            done = ask(command)
        except ConfigError as error:
            done = subprocess.CompletedProcess(command, 1, "", str(error))
        if not done.returncode or is_final(done.stderr) or time.monotonic() > until:
            return done
        time.sleep(LOOK_SECONDS)


def _first(text: str) -> str:
    """Slurm's own words: its first line without what says which program speaks."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines() if line.strip()]
    return ": ".join(dict.fromkeys(lines))[:300] or "it does not say why"


class Following:
    """Shows a submitted job: its state while it is queued, then its output; ends with its exit code."""

    def __init__(
        self, job: str, output: pathlib.Path, say: Callable[[str], None], restart_seconds: float = RESTART_SECONDS
    ) -> None:
        self._job, self._output, self._say, self._restart_seconds = job, output, say, restart_seconds
        self._shown = 0

    def run(self, queue_seconds: float) -> int:
        """`queue_seconds`: for the job to start; 0: however long it takes."""
        told, queued_at = "", time.monotonic()
        try:
            while True:
                state, reason, code = self._look()
                self._show()
                if state in _OVER:
                    time.sleep(LOOK_SECONDS / 4)
                    self._show()
                    if state != "COMPLETED":
                        self._say(f"Slurm: job {self._job} is {state}")
                    return self._verdict(code or (0 if state == "COMPLETED" else 1))
                if state == "PENDING":
                    told = self._wait(reason, told, time.monotonic() - queued_at, queue_seconds)
                else:
                    queued_at = time.monotonic()
                time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            self._say(f"Ctrl-C: job {self._job} is cancelled")
            self.cancel()
            return 130

    def cancel(self) -> None:
        done = ask(["scancel", self._job])
        if done.returncode:
            self._say(f"scancel {self._job} has failed: {_first(done.stderr)}; run it again")

    def _wait(self, reason: str, told: str, waited: float, queue_seconds: float) -> str:
        if reason in NEVER:
            self.cancel()
            raise ConfigError(
                f"Slurm will not start job {self._job}: {reason}; it is cancelled; sinfo shows the limits"
            )
        if queue_seconds and waited > queue_seconds:
            self.cancel()
            raise ConfigError(
                f"job {self._job} did not start within {queue_seconds:g} s: it waits for {reason}; it is cancelled; "
                "give it longer with --queue-seconds, or leave it in the queue with --detach"
            )
        if reason not in (told, "None"):
            self._say(f"job {self._job} is in the queue; Slurm says it waits for: {reason}")
        return reason

    def _look(self) -> tuple[str, str, int]:
        """State, reason and exit code."""
        done = ask_patiently(
            ["scontrol", "--oneliner", "show", "job", self._job],
            self._restart_seconds,
            lambda said: FORGOTTEN in said,
        )
        found = dict(re.findall(r"(JobState|Reason|ExitCode)=(\S+)", done.stdout))
        if "JobState" in found:
            code = int(found.get("ExitCode", "0:0").partition(":")[0])
            return found["JobState"], found.get("Reason", ""), code
        if FORGOTTEN in done.stderr:
            if exit_code_of(self._output.parent, self._job) is not None:
                return "COMPLETED", "", 0
            raise ConfigError(f"Slurm does not know job {self._job} any more; its output is in {self._output}")
        raise ConfigError(
            f"Slurm has not answered for {self._restart_seconds:g} s: {_first(done.stderr)}. Job {self._job} is left "
            f"to itself, and this command no longer follows it; tail -F {shlex.quote(str(self._output))} does, "
            f"squeue -j {self._job} shows its state, and scancel {self._job} ends it"
        )

    def _verdict(self, code: int) -> int:
        """The job's own exit code, where it came to its end: Slurm counts tasks of lost hosts too."""
        own = exit_code_of(self._output.parent, self._job)
        return code if own is None else own

    def _show(self) -> None:
        try:
            with open(self._output, "rb") as file:
                file.seek(self._shown)
                data = file.read()
        except OSError:
            return
        self._shown += len(data)
        sys.stdout.write(data.decode("utf-8", "replace"))
        sys.stdout.flush()
