"""The server in a worker's process: how long it stays, and what it takes along."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.launch.played import FILE

from syncline.errors import ConfigError, JobFailed, WaitTimeout
from syncline.launch import ringing
from syncline.launch.ringing import OwnServer
from syncline.launch.serving import End
from syncline.launch.working import join_as_worker

SECONDS = 60.0


def test_what_a_script_wants_and_the_launch_has_not_is_said() -> None:
    """Its servers run already, in processes of their own. Where the launch has said so, the launch counts."""
    with pytest.raises(ConfigError, match=r'exchange="ring".: this job has servers, .* syncline run --exchange ring'):
        join_as_worker(FILE, "worker-0", "local", {"exchange": "ring"})


class Serving:
    """Plays the server: is relieved when the test says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_asked = threading.Event()
        self.free = threading.Event()
        self.num_refusals = 0
        self.is_in = False

    def leave(self) -> None:
        self.calls.append("leave")
        self.is_asked.set()
        if self.num_refusals:
            self.num_refusals -= 1
            raise ConfigError("server-0 is the last server: its slices cannot go anywhere")
        assert self.free.wait(SECONDS)

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ringing, "TOGETHER_SECONDS", 0.01)
    monkeypatch.setattr(ringing, "AGAIN_SECONDS", 0.01)
    own_server = OwnServer(FILE, "worker-0", "local")
    serving: Any = Serving()
    own_server._serving = serving
    return own_server


def in_a_thread(own: OwnServer, code: int) -> tuple[threading.Thread, list[int]]:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(own.finish(code)), name="finish", daemon=True)
    thread.start()
    return thread, found


def test_its_server_has_the_number_of_its_worker() -> None:
    """And if nobody chose one, it follows from what the job gives the worker."""
    assert OwnServer(FILE, "worker-3", "local")._name == "server-3"
    assert OwnServer(FILE, "", "local")._name == ""


def test_a_worker_begins_when_its_server_is_a_member(own: Any) -> None:
    threading.Timer(0.05, lambda: setattr(own._serving, "is_in", True)).start()
    own.wait_until_in(SECONDS)
    assert own._serving.is_in
    own._serving.is_in = False
    with pytest.raises(WaitTimeout, match=r"server-0 of this process was not in the job within 0.02 s"):
        own.wait_until_in(0.02)


def test_a_bug_of_its_server_ends_the_process_at_once(own: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Nothing that the worker computes counts any more; but a script that has ended is not undone by it."""
    codes: list[int] = []
    monkeypatch.setattr(ringing.os, "_exit", codes.append)
    own._hear(End(1, "server-0 has a bug: KeyError: 3", is_bug=True))
    assert codes == [1] and "server-0 has a bug: KeyError: 3" in capsys.readouterr().err
    own._is_over.clear()
    own._is_finishing = True
    own._hear(End(1, "server-0 has a bug: KeyError: 3", is_bug=True))
    assert codes == [1] and own._is_over.is_set()


def test_a_script_that_never_joined_has_no_server() -> None:
    assert OwnServer(FILE, "worker-0", "local").finish(0) == 0


def test_a_script_that_failed_takes_its_server_along_at_once(own: Any) -> None:
    assert own.finish(3) == 3 and own._serving.calls == ["close"]


def test_when_the_job_is_over_nothing_is_handed_over(own: Any) -> None:
    own._hear(End(0))
    assert own.finish(0) == 0 and own._serving.calls == ["close"]


def test_while_others_train_it_stays_until_they_have_everything(own: Any) -> None:
    thread, found = in_a_thread(own, 0)
    assert own._serving.is_asked.wait(SECONDS)
    assert not found and own._serving.calls == ["leave"]
    own._serving.free.set()
    thread.join(SECONDS)
    assert found == [0] and own._serving.calls == ["leave", "close"]


def test_the_last_one_asks_again_until_another_is_there(own: Any) -> None:
    """The others' processes died, and start again."""
    own._serving.num_refusals = 3
    own._serving.free.set()
    assert own.finish(0) == 0
    assert own._serving.calls == ["leave"] * 4 + ["close"]


def test_the_end_of_the_job_ends_a_leave_that_is_not_answered(own: Any) -> None:
    thread, found = in_a_thread(own, 0)
    assert own._serving.is_asked.wait(SECONDS)
    own._hear(End(1, "JobFailed: the job has ended: worker-1 was killed"))
    thread.join(SECONDS)
    own._serving.free.set()
    assert found == [0], "the script had ended well"


def test_a_server_that_is_refused_ends_its_workers_waiting(own: Any) -> None:
    """Nobody would come for the worker; but what is wrong with the whole job each of them hears by itself."""
    closed: list[str] = []
    own._on_refused = lambda: closed.append("worker")
    own._hear(End(1, error=JobFailed("worker-1: init(): no such policy")))
    assert not closed
    own._hear(End(1, error=ConfigError("server-0 is in the job already; each name is one process")))
    assert closed == ["worker"]
    with pytest.raises(ConfigError, match="server-0 is in the job already"):
        own.check()
    with pytest.raises(ConfigError, match="server-0 is in the job already"):
        own.wait_until_in(SECONDS)
