"""A process that listens already and does not answer yet: no refusal, for whoever dials, and no stranger, for it."""

from __future__ import annotations

import pathlib
import queue
import socket
import threading

import pytest
from tests.patience import PATIENCE

from syncline.errors import NoAnswer
from syncline.net import handshake, tcp
from syncline.net.transport import Peer

TOKEN = bytes(32)
ASKING = tcp.Identity("job-1", TOKEN, Peer("worker", "worker-0", 0))
LISTENING = tcp.Identity("job-1", TOKEN, Peer("server", "server-0", 0))


@pytest.mark.parametrize("answers", [False, True])
def test_silence_is_no_answer_yet_at_any_part_of_a_handshake(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 0.3)
    with tcp.bind("127.0.0.1", 0) as sock:

        def challenge() -> None:
            side = handshake.Listening(TOKEN, "job-1", LISTENING.me, "")
            accepted, _ = sock.accept()
            with accepted:
                accepted.sendall(side.challenge(accepted.recv(512)[handshake.PREFIX_BYTES :]))
                has_answered.set()
                is_over.wait(PATIENCE)

        is_over, has_answered = threading.Event(), threading.Event()
        thread = threading.Thread(target=challenge if answers else is_over.wait, daemon=True)
        thread.start()
        with pytest.raises(NoAnswer, match=r"no handshake within 0\.3 s"):
            tcp.connect_tcp(*sock.getsockname(), ASKING, PATIENCE)
        assert has_answered.wait(PATIENCE if answers else 0.0) == answers
        is_over.set()
        thread.join(PATIENCE)


def test_over_tls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "is_loopback", lambda host: False)
    with tcp.bind("127.0.0.1", 0) as sock, pytest.raises(NoAnswer, match=r"no TLS handshake within 0\.3 s"):
        tcp.connect_tcp(*sock.getsockname(), ASKING, 0.3)


def test_who_gave_up_before_it_was_answered_is_not_said_to_lack_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dialled before we were awake, and dials again: a user who reads of tokens would look for a wrong one."""
    monkeypatch.setattr(handshake, "SECONDS", PATIENCE)
    sock, lines, accepted = tcp.bind("127.0.0.1", 0), queue.Queue(), queue.Queue()
    with socket.create_connection(sock.getsockname()) as early:
        early.sendall(handshake.Connecting(TOKEN, "job-1", ASKING.me, "").hello())
    listener = tcp.Listener(LISTENING, accepted.put, sock=sock, log=lines.put)
    try:
        line = lines.get(timeout=PATIENCE)
        assert line.endswith(
            "ended: worker-0 closed it before this process, which was busy, could answer; it tries again by itself"
        )
        tcp.connect_tcp("127.0.0.1", listener.address.port, ASKING, PATIENCE).close()
        assert accepted.get(timeout=PATIENCE).peer.name == "worker-0"
    finally:
        listener.close()


def test_a_unix_socket_whose_queue_is_full_is_there_and_has_no_time(tmp_path: pathlib.Path) -> None:
    """Else a worker would take it for a server of another host, and go over sockets from then on."""
    path, waiting = str(tmp_path / "full"), []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen(0)
        try:
            for _ in range(64):
                waiting.append(sock := socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.setblocking(False)
                sock.connect(path)
        except BlockingIOError:
            pass
        with pytest.raises(NoAnswer, match="too many wait to be heard there"):
            tcp.connect_unix(path, ASKING, 0.2)
        for sock in waiting:
            sock.close()
    with pytest.raises(FileNotFoundError):
        tcp.connect_unix(str(tmp_path / "none"), ASKING, 0.2)
