"""The floors between two processes: every byte goes there and back, and a stranger is turned away."""

from __future__ import annotations

import socket
import threading

import pytest
from tests.patience import PATIENCE

from syncline.bench import links


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_SECONDS", PATIENCE)


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("num_bytes", [64, 3 * links.PIECE_BYTES + 17])
def test_every_byte_comes_back(is_tls: bool, num_bytes: int):
    """A stranger that connects first, with a token of its own, is not taken for the near end."""
    listening, errors = links.BenchListener("127.0.0.1", is_tls=is_tls), list[Exception]()

    def serve() -> None:
        try:
            with listening.accept() as far:
                for _ in range(2):
                    far.echo(num_bytes)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with socket.create_connection(("127.0.0.1", listening.port)) as stranger:
        stranger.sendall(b"x" * 64)
    with links.connect("127.0.0.1", listening.port, listening.token, num_bytes, is_tls=is_tls) as near:
        for _ in range(2):
            near.exchange()
    thread.join(PATIENCE)
    assert not thread.is_alive() and errors == []


def test_the_address_on_the_way_to_a_host():
    assert links.address_towards("127.0.0.1") == "127.0.0.1"
    assert links.address_towards("255.255.255.255") == ""  # no permission to broadcast: there is no way
