"""A look at the other hosts of a job before anything starts: can they start a command, which versions do they have,
do they see the script? With `--sync-code` they also get the working folder.

`python -m syncline.launch.greeting` is the other side.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from syncline import config as configuration
from syncline.core.units import counted
from syncline.errors import ConfigError, SynclineError
from syncline.launch.code_transfer import File, collect, receive, send
from syncline.launch.processes import LOCAL_HOSTS, command_on
from syncline.launch.versions import InstalledVersions, differing, torch_told, versions_here

#: Begins the other side's lines: a login may print others.
_MARK = "syncline-host "
_MOST_AT_ONCE = 16
#: For all files of the working folder to reach a host, once it has answered.
SEND_SECONDS = 900.0
_MOST_WORDS = 1000


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What the other host is asked, on its standard input."""

    folder: str
    script: str  #: below the folder, or absolute; empty: a module
    mark: str = ""  #: a file that lies in the folder for this moment
    sends: bool = False  #: files follow, unless both hosts see the same folder


class HostAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What it says."""

    versions: InstalledVersions
    sees_script: bool
    shares_folder: bool


class Visit(NamedTuple):
    """What a look at the hosts has to do on each of them."""

    remote: str
    folder: pathlib.Path
    script: str
    seconds: float
    mark: str
    files: Sequence[File] | None  # None: they are not sent


def greet(
    hosts: Sequence[str],
    remote: str,
    script: str,
    seconds: float,
    *,
    sync_code: bool = False,
    left_out: Sequence[pathlib.Path] = (),
) -> list[str]:
    """Looks at the hosts, all at once, and sends them the working folder if so told; lines that are worth telling.

    A ConfigError names the first host with which the job cannot run. `script`: empty for a module. `left_out`: is
    not sent.
    """
    others = [host for host in hosts if host not in LOCAL_HOSTS]
    if not others:
        return []
    folder = pathlib.Path.cwd()
    files = collect(folder, left_out) if sync_code else None
    with _marked(folder, files is not None) as mark:
        visit = Visit(remote, folder, script, seconds, mark, files)
        with concurrent.futures.ThreadPoolExecutor(min(len(others), _MOST_AT_ONCE)) as pool:
            answers = list(pool.map(lambda host: _visit(host, visit), others))
    lines = [line for host, one in zip(others, answers, strict=True) if (line := _torch(host, one))]
    if files is not None:
        sent = [host for host, one in zip(others, answers, strict=True) if not one.shares_folder]
        size = sum(file.size_bytes for file in files) / (1 << 20)
        lines += [f"sent {counted(len(files), 'file')} ({size:.1f} MiB) to {', '.join(sent)}"] if sent else []
        shared = [host for host in others if host not in sent]
        lines += [f"{', '.join(shared)} sees this folder: nothing is sent there"] if shared else []
    return lines


def _torch(host: str, answer: HostAnswer) -> str:
    return torch_told(answer.versions, versions_here(), host)


@contextlib.contextmanager
def _marked(folder: pathlib.Path, is_needed: bool) -> Iterator[str]:
    if not is_needed:
        yield ""
        return
    mark = folder / f".syncline-{secrets.token_hex(8)}"
    try:
        mark.touch()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    try:
        yield mark.name
    finally:
        mark.unlink(missing_ok=True)


def _visit(host: str, visit: Visit) -> HostAnswer:
    command = command_on(host, visit.remote, [sys.executable, "-m", "syncline.launch.greeting"])
    greeting = Greeting(folder=str(visit.folder), script=visit.script, mark=visit.mark, sends=visit.files is not None)
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
                env=configuration.inherited_environment({}),
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"host {host}: {shlex.join(command)} cannot be started: {error}") from None
        deadline = _Deadline(process, visit.seconds, "has not answered")
        try:
            answer = _talk(process, host, greeting, visit, deadline)
            code = process.wait()
        finally:
            how = deadline.end()
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        if code or answer is None:
            errors.seek(0)
            words = " ".join(errors.read()[-_MOST_WORDS:].decode("utf-8", "replace").split())
            how = how or f"ended with exit code {code}"
            raise ConfigError(
                f"host {host}: {shlex.join(command)} {how}{f': {words}' if words else ''}; each host needs the same "
                "Python, with the same version of syncline, at the same path"
            )
    return answer


class _Deadline:
    """Ends a process that is late with what it is to do now."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float, failing: str) -> None:
        self._process = process
        self._begin(seconds, failing)

    def _begin(self, seconds: float, failing: str) -> None:
        self._told = f"{failing} within {seconds:g} s"
        self._timer = threading.Timer(seconds, self._process.kill)
        self._timer.start()

    def next(self, seconds: float, failing: str) -> None:
        if self.end():
            return  # it is being killed
        self._begin(seconds, failing)

    def end(self) -> str:
        """What it was late with; empty: with nothing."""
        is_late = self._timer.finished.is_set()
        self._timer.cancel()
        return self._told if is_late else ""


def _talk(
    process: subprocess.Popen[bytes], host: str, greeting: Greeting, visit: Visit, deadline: _Deadline
) -> HostAnswer | None:
    """Its answer; None: it has ended before."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(greeting) + b"\n")
        process.stdin.flush()
    answer = None
    for line in process.stdout:
        text = line.decode("utf-8", "replace")
        if text.startswith(_MARK):
            try:
                answer = msgspec.json.decode(text.removeprefix(_MARK), type=HostAnswer)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"host {host} has another syncline: its answer is wrong: {error}") from None
            break
    if answer is None:
        return None
    if trouble := differing(answer.versions, versions_here(), host):
        raise ConfigError(trouble)
    with contextlib.suppress(BrokenPipeError):
        if visit.files is not None and not answer.shares_folder:
            deadline.next(SEND_SECONDS, "has not taken the files")
            send(visit.folder, visit.files, process.stdin)
        elif not answer.sees_script:
            raise ConfigError(
                f"host {host} does not see {os.path.join(visit.folder, visit.script)}: use a disk that all hosts "
                "share, copy the files to the same path, or add --sync-code"
            )
        process.stdin.close()
    process.stdout.read()
    return answer


def main() -> int:
    """The other side."""
    greeting = msgspec.json.decode(sys.stdin.buffer.readline(), type=Greeting)
    folder = pathlib.Path(greeting.folder)
    shares = bool(greeting.mark) and (folder / greeting.mark).exists()
    sees = not greeting.script or (folder / greeting.script).is_file()
    answer = HostAnswer(versions=versions_here(), sees_script=sees, shares_folder=shares)
    sys.stdout.write(f"{_MARK}{msgspec.json.encode(answer).decode()}\n")
    sys.stdout.flush()
    if greeting.sends and not shares:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            receive(folder, sys.stdin.buffer)
        except (SynclineError, OSError) as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
