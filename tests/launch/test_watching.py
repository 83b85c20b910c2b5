"""The launcher's way to a coordinator that dies and comes back, as a real process."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.core.wire.control import AskStatus, Died, GivenStatus
from syncline.errors import ConnectionLost
from syncline.launch import jobfile
from syncline.launch.processes import MemberPlan, MemberProcess, start_member
from syncline.launch.watching import Watching, ask
from syncline.net import tcp


def wait(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_it_looks_on_when_the_coordinator_is_back(tmp_path: pathlib.Path) -> None:
    """The same listening socket: whoever connects meanwhile waits, and is answered by the next one."""
    given = {"runs": str(tmp_path), "name": "watched", "workers": 2}
    with tcp.bind("127.0.0.1", 0) as sock:
        sock.listen(128)
        file = jobfile.new("127.0.0.1", sock.getsockname()[1], given)
        watching = Watching(file)
        processes: list[MemberProcess] = []

        def start(resumes: bool) -> None:
            plan = MemberPlan(
                role="coordinator", name="coordinator", host="local", file=file, listen_fd=sock.fileno()
            )
            processes.append(start_member(MemberPlan(**{**_fields(plan), "resumes": resumes})))

        try:
            start(False)
            watching.start()
            assert watching.look_now(PATIENCE) and not watching.take()[-1].formed
            first = ask(file, AskStatus(), GivenStatus, PATIENCE).status
            os.kill(processes[0].pid, signal.SIGKILL)
            wait(lambda: processes[0].poll() is not None)
            watching.take()
            assert not watching.tell(Died("worker-0", "was killed"), 0.2) and not watching.is_told("worker-0")
            start(True)
            wait(lambda: watching.is_told("worker-0"))
            assert watching.look_now(PATIENCE)
            assert ask(file, AskStatus(), GivenStatus, PATIENCE).status.term == first.term + 1
        finally:
            watching.close()
            for process in processes:
                process.stop(PATIENCE)


def _fields(plan: MemberPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


def test_a_job_that_is_not_there_is_said_soon() -> None:
    with tcp.bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"no answer from the coordinator at .*:\d+ within 0\.5 s .*; has the"):
        ask(jobfile.new("127.0.0.1", port, {}), AskStatus(), GivenStatus, 0.5)
    assert time.monotonic() - began < PATIENCE / 5
