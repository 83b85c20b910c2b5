"""Members that are forked from a process with torch loaded: as those of a new interpreter, but sooner."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.launch import forkserver, jobfile
from syncline.launch.forkserver import ForkServer
from syncline.launch.processes import MemberPlan, MemberProcess, start_member
from syncline.launch.running import Script, mentions_torch

SAYS = """
import sys
has_torch, has_more = "torch" in sys.modules, "colorsys" in sys.modules
import json, os, random
import numpy, torch
if sys.argv[1:] == ["one thread"]:
    os.environ["OMP_NUM_THREADS"] = "1"
words = open("/proc/self/cmdline").read().rstrip("\\0").split("\\0")
said = {
    "has_torch": has_torch, "has_more": has_more, "parent": os.getppid(), "group": os.getpgrp(), "pid": os.getpid(),
    "words": words[-3:],
    "arguments": sys.argv, "main": __name__, "threads": torch.get_num_threads(),
    "numbers": [random.random(), numpy.random.rand(), torch.initial_seed(), float(torch.rand(()))],
    "fault": os.environ.get("SYNCLINE_FAULT"), "folder": os.getcwd(), "sum": float(torch.ones(1 << 20).sum()),
    "open": len(os.listdir("/proc/self/fd")),
}
print(json.dumps(said))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer(also=["colorsys"])
    made.start()
    yield made
    made.close()


def plan(folder: pathlib.Path, text: str, *, name: str = "worker-1", **more: Any) -> MemberPlan:
    (folder / f"{name}.py").write_text(text)
    file = jobfile.new("127.0.0.1", 1, {"start_seconds": 0.1})
    given = {"folder": str(folder), "num_local_workers": 1, "loads_torch": True, **more}
    return MemberPlan(role="worker", name=name, host="local", file=file, script=str(folder / f"{name}.py"), **given)


def end_of(process: MemberProcess) -> tuple[str, int]:
    said = process.output.read().decode()  # until it has ended
    until = time.monotonic() + PATIENCE
    while (code := process.poll()) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert code is not None
    process.stop(PATIENCE)
    return said, code


def said_by(process: MemberProcess) -> dict[str, Any]:
    said, code = end_of(process)
    assert code == 7, said
    found: dict[str, Any] = json.loads(said)
    return found


def test_it_is_as_if_a_new_interpreter_had_started_it(fork_server: ForkServer, tmp_path: pathlib.Path) -> None:
    forked = start_member(plan(tmp_path, SAYS, arguments=["a b"]), "", fork_server)
    plain = start_member(plan(tmp_path, SAYS, arguments=["a b"]))
    mine, others = said_by(forked), said_by(plain)
    assert (mine["has_torch"], others["has_torch"]) == (mine["has_more"], others["has_more"]) == (True, False)
    assert mine["parent"] == os.getpid() and mine["group"] == mine["pid"] == forked.pid
    assert mine["words"] == ["-m", "syncline.launch.member", "worker-1"]
    differ = {key for key in mine if mine[key] != others[key]}
    assert differ == {"has_torch", "has_more", "group", "pid", "numbers"}, (mine, others)


def test_no_two_of_them_draw_the_same_numbers(fork_server: ForkServer, tmp_path: pathlib.Path) -> None:
    names = ("worker-0", "worker-1")
    both = [start_member(plan(tmp_path, SAYS, name=name), "", fork_server) for name in names]
    one, other = (said_by(process)["numbers"] for process in both)
    assert not {*one} & {*other}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_it_computes_with_its_share_of_the_cores(
    fork_server: ForkServer, tmp_path: pathlib.Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library reads OMP_NUM_THREADS when it is loaded, and here it was loaded before this was known."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    process = start_member(plan(tmp_path, SAYS, num_local_workers=num_workers), "", fork_server)
    cores = len(os.sched_getaffinity(0))
    assert said_by(process)["threads"] == max(1, cores // num_workers)


def test_a_script_may_say_how_many_threads_before_it_imports_torch(
    fork_server: ForkServer, tmp_path: pathlib.Path
) -> None:
    text = """
        import os
        os.environ["OMP_NUM_THREADS"] = "3"
        import torch
        import syncline
        from syncline.launch import threads
        threads.settle_again()  # as init() does
        print(torch.get_num_threads())
        torch.set_num_threads(2)
        os.environ["OMP_NUM_THREADS"] = "5"
        threads.settle_again()
        print(torch.get_num_threads())
    """
    said, code = end_of(start_member(plan(tmp_path, "\n".join(x[8:] for x in text.split("\n"))), "", fork_server))
    assert (said, code) == ("3\n2\n", 0)


def test_how_it_died_is_known_and_what_it_had_started_dies_too(
    fork_server: ForkServer, tmp_path: pathlib.Path
) -> None:
    text = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    process = start_member(plan(tmp_path, text), "", fork_server)
    child = int(process.output.readline())
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert process.poll() == -signal.SIGKILL
    while is_alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(child)
    process.stop(PATIENCE)


def test_a_fault_is_for_the_first_life_only(
    fork_server: ForkServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_FAULT", "server-7@replicate.sent=kill")
    process = start_member(plan(tmp_path, SAYS, starts_again=True), "", fork_server)
    assert said_by(process)["fault"] == ""


def test_without_the_fork_server_a_member_starts_in_the_plain_way(tmp_path: pathlib.Path) -> None:
    """It was killed, or there was no room for it."""
    before, lost = children(), ForkServer()
    lost.start()
    pid = next(pid for _ in range(1000) for pid in children() - before)  # the kernel shows its words a moment later
    os.kill(pid, signal.SIGKILL)
    process = start_member(plan(tmp_path, "print('well')"), "", lost)
    assert end_of(process) == ("well\n", 0)
    assert lost.fork("worker-0", {}) is None


def children(of: int = 0) -> set[int]:
    """Of this process, or another, those that load what members need."""
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == (of or os.getpid()) and b"syncline.launch.preloaded" in words:
            found.add(int(entry.name))
    return found


def test_it_ends_with_the_launcher(tmp_path: pathlib.Path) -> None:
    """Also a launcher that is killed: nobody is left to tell it."""
    text = "import time; from syncline.launch.forkserver import ForkServer; ForkServer().start(); time.sleep(600)"
    launcher = subprocess.Popen([sys.executable, "-c", text])
    until = time.monotonic() + PATIENCE
    while not (made := children(launcher.pid)) and time.monotonic() < until:
        time.sleep(0.01)
    (pid,) = made
    launcher.kill()
    launcher.wait()
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Loading:
    """In the place of the fork server's process: it loads torch, and answers nothing meanwhile."""

    def __init__(self, command: list[str], *, pass_fds: list[int], **rest: Any) -> None:
        self.control: int | None = os.dup(pass_fds[0])

    def kill(self) -> None:
        if self.control is not None:
            os.close(self.control)
        self.control = None

    def wait(self) -> None:
        return


def test_a_signal_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it loads torch, the launcher's one thread waits in `fork`: Ctrl-C was heard up to a minute later."""
    monkeypatch.setattr(forkserver.subprocess, "Popen", Loading)
    told: list[str] = []
    made = ForkServer(told.append)
    made.start()
    timer = threading.Timer(0.1, made.interrupt)
    timer.start()
    began = time.monotonic()
    assert made.fork("worker-0", {}) is None
    assert time.monotonic() - began < forkserver.ANSWER_SECONDS / 2
    timer.join()
    made.interrupt()  # again, and after its end: nothing
    made.close()
    assert not told, "the user knows why"


def test_a_job_says_why_its_members_start_in_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute of silence, and then members that start slowly, looked like a launcher that hangs."""
    monkeypatch.setattr(forkserver.subprocess, "Popen", Loading)
    monkeypatch.setattr(forkserver, "ANSWER_SECONDS", 0.1)
    told: list[str] = []
    made = ForkServer(told.append)
    made.start()
    assert made.fork("worker-0", {}) is None and made.fork("worker-1", {}) is None
    made.close()
    (line,) = told
    assert "has not answered within 0.1 s" in line


def test_too_many_open_files_are_for_the_plain_way_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the member and the command; here an OSError would end the launcher with a traceback."""
    monkeypatch.setattr(forkserver.subprocess, "Popen", Loading)
    made, pipe, pipes = ForkServer(), os.pipe, list[tuple[int, int]]()
    made.start()

    def second_fails() -> tuple[int, int]:
        if pipes:
            raise OSError(24, "Too many open files")
        pipes.append(pipe())
        return pipes[0]

    monkeypatch.setattr(forkserver.os, "pipe", second_fails)
    assert made.fork("worker-0", {}) is None
    for fd in pipes[0]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    made.close()


def test_a_signal_handler_may_signal_a_member_that_is_being_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second Ctrl-C kills all, in the thread that may be about to note how one ended: it waited for itself."""
    with open(os.devnull, "r+b") as nothing:
        process = forkserver.ForkedProcess(1 << 30, nothing, nothing)

    def interrupted(pid: int, options: int) -> tuple[int, int]:
        process.send_signal(signal.SIGKILL)
        return pid, signal.SIGTERM

    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(forkserver.os, "waitpid", interrupted)
    monkeypatch.setattr(forkserver.os, "kill", gone)
    thread = threading.Thread(target=process.poll, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive() and process.returncode == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_several_launchers_of_a_process_adopt_until_the_last_is_done() -> None:
    """The first that was done ended it for the others, whose members were nobody's children then."""
    subreaper = forkserver.Subreaper()
    before = subreaper.is_on()
    with subreaper.adopting():
        with subreaper.adopting():
            assert subreaper.is_on()
        assert subreaper.is_on()
    assert subreaper.is_on() == before
    outer = forkserver.Subreaper()
    with outer.adopting():  # as a process that asked for it itself
        with subreaper.adopting():
            pass
        assert subreaper.is_on()


def test_elsewhere_than_on_linux_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver.sys, "platform", "darwin")
    made = ForkServer()
    made.start()
    assert made.fork("worker-0", {}) is None
    made.close()


@pytest.mark.parametrize(
    ("text", "does"),
    [
        ("import torch", True),
        ("import os, torch", True),
        ("    from torch import nn", True),
        ("from syncline.torch import DataLoader", True),
        ("import syncline.torch as st", True),
        ("import torchvision", False),
        ("import numpy as np  # not torch", False),
        ("print('import torch')", False),
        ("", False),
    ],
)
def test_which_scripts_load_torch(tmp_path: pathlib.Path, text: str, does: bool) -> None:
    (tmp_path / "script.py").write_text(f"import sys\n{text}\n")
    assert mentions_torch(Script(path=str(tmp_path / "script.py"))) == does


def test_a_module_that_loads_torch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/train.py").write_text("import torch\n")
    assert mentions_torch(Script(path="package.train", is_module=True))
    assert not mentions_torch(Script(path="nowhere.train", is_module=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], pytest.param(["--no-preload"], marks=pytest.mark.proof)])
def test_a_job_loads_torch_before_its_scripts_unless_told_otherwise(commands: Any, options: list[str]) -> None:
    script = commands.script("""
        import sys
        before = "torch" in sys.modules
        import syncline
        if len(sys.argv) > 1:
            import torch
        syncline.init()
        print("before:", before)
    """)
    result = commands.run("run", "-w", "2", "-s", "1", *options, script, is_forked=False)
    assert result.code == 0, result.output
    assert result.output.count(f"before: {not options}") == 2, result.output
    commands.check_nothing_left()
