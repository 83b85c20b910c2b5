"""How `syncline top` asks: a coordinator that is gone for a while, and a job that has ended."""

from __future__ import annotations

import fcntl
import pathlib
import socket
import threading

from tests.patience import PATIENCE

from syncline.launch import jobfile
from syncline.launch.jobfile import JobFile
from syncline.top import looking
from syncline.top.looking import Looking, Seen, Trouble


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_coordinator_that_is_gone_and_then_its_job(tmp_path: pathlib.Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """As long as the launcher holds the folder the job may go on; then it has ended, and nothing more is asked."""
    monkeypatch.setattr(looking, "LOOK_SECONDS", 0.01)
    (tmp_path / "one").mkdir()
    file: JobFile = jobfile.new("127.0.0.1", closed_port(), {"runs": str(tmp_path), "name": "one"})
    seen: list[Seen] = []
    is_over, is_gone = threading.Event(), threading.Event()

    def show(one: Seen) -> None:
        seen.append(one)
        assert isinstance(one, Trouble)
        (is_over if one.is_over else is_gone).set()

    with open(tmp_path / "one" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        own = Looking(file, show)
        own.start()
        assert is_gone.wait(PATIENCE)
        assert not is_over.is_set()
    assert is_over.wait(PATIENCE)
    own.close()
    texts = [one.text for one in seen if isinstance(one, Trouble)]
    assert "no answer from the coordinator for" in texts[0] and texts[-1] == "the job has ended"
