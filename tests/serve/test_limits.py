"""Tokens, rates, bytes and connections."""

from __future__ import annotations

import os
import pathlib

import pytest

from syncline.errors import ConfigError
from syncline.serve.datatypes import RequestError
from syncline.serve.limits import ByteBudget, Connections, Gate, make_token, parse_rate, read_token


def test_only_the_token_opens_the_gate(tmp_path: pathlib.Path) -> None:
    token = make_token(tmp_path / "token")
    assert read_token(tmp_path / "token") == token and os.stat(tmp_path / "token").st_mode & 0o777 == 0o600
    gate = Gate(token, 0.0)
    gate.check_token(f"Bearer {token}".encode())
    for wrong in (b"", b"Bearer ", token.encode(), f"Bearer {token}x".encode(), f"bearer {token[:-1]}".encode()):
        with pytest.raises(RequestError) as caught:
            gate.check_token(wrong)
        assert caught.value.status == 401
    Gate("", 0.0).check_token(b"")


def test_pages_of_other_sites_may_not_ask_where_no_token_is_needed() -> None:
    """A name of theirs may lead to 127.0.0.1, so that a browser takes the answers for their own."""
    gate = Gate("", 0.0, "my-host")
    for host, origin in (
        (b"127.0.0.1:8000", b""),
        (b"localhost", b"http://localhost:8000"),
        (b"[::1]:8000", b"http://127.0.0.1:8000"),
        (b"My-Host:80", b"http://my-host"),
        (b"", b""),
    ):
        gate.check_site(host, origin)
    for host, origin, status in (
        (b"evil.example:8000", b"", 421),
        (b"127.0.0.1.evil.example", b"", 421),
        (b"localhost.evil.example:8000", b"", 421),
        (b"127.0.0.1:8000", b"http://evil.example", 403),
        (b"127.0.0.1:8000", b"null", 403),
        (b"127.0.0.1:8000", b"http://localhost@evil.example", 403),
    ):
        with pytest.raises(RequestError) as caught:
            gate.check_site(host, origin)
        assert caught.value.status == status
        Gate("a token of many letters", 0.0).check_site(host, origin)


def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "token"
    for text, mode, words in (
        ("x" * 30, 0o644, "chmod 600"),
        ("short", 0o600, "at least 16"),
        ("", 0o600, "at least"),
    ):
        path.write_text(text)
        path.chmod(mode)
        with pytest.raises(ConfigError, match=words):
            read_token(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_rates_are_per_address() -> None:
    assert parse_rate("100/s") == 100.0 and parse_rate("60/m") == 1.0
    for wrong in ("100", "0/s", "-1/s", "1/h", ""):
        with pytest.raises(ConfigError, match="--rate"):
            parse_rate(wrong)
    gate = Gate("", 2.0)
    for _ in range(2):
        gate.check_rate("a", 10.0)
    with pytest.raises(RequestError) as caught:
        gate.check_rate("a", 10.0)
    assert caught.value.status == 429 and 0.0 < caught.value.retry_seconds <= 0.5
    gate.check_rate("b", 10.0)
    gate.check_rate("a", 10.5)
    with pytest.raises(RequestError):
        gate.check_rate("a", 10.5)


def test_bytes_of_all_requests_are_bounded() -> None:
    budget = ByteBudget(100)
    budget.take(60)
    with pytest.raises(RequestError) as caught:
        budget.take(41)
    assert caught.value.status == 503
    budget.give(60)
    budget.take(100)


class Transport:
    """What `Connections` uses of one."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def test_too_many_connections_cost_those_that_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = Connections(3, head_seconds=5.0, idle_seconds=60.0)
    made = [Transport() for _ in range(10)]
    connections.made(0, made[0])  # type: ignore[arg-type]
    connections.begins(0)
    connections.ends(0, is_proven=True)
    for peer in range(1, 10):
        connections.made(peer, made[peer])  # type: ignore[arg-type]
    assert [one.is_aborted for one in made] == [False, *[True] * 7, False, False] and len(connections) == 3
    assert connections.num_evicted == 7


def test_who_does_not_send_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow-loris sends a byte now and then; a head without end would fill the memory."""
    now = 100.0
    monkeypatch.setattr("syncline.serve.limits.time.monotonic", lambda: now)
    connections = Connections(10, head_seconds=5.0, idle_seconds=60.0)
    silent, slow, busy, idle, endless = made = [Transport() for _ in range(5)]
    for peer, transport in enumerate(made):
        connections.made(peer, transport)  # type: ignore[arg-type]
    for peer in (2, 3):
        connections.begins(peer)
    connections.ends(3, is_proven=True)
    connections.received(1, 1)
    connections.received(4, 1 << 21)
    assert endless.is_aborted
    connections.sweep(now + 4.0)
    assert not (silent.is_aborted or slow.is_aborted)
    connections.sweep(now + 6.0)
    assert silent.is_aborted and slow.is_aborted and not (busy.is_aborted or idle.is_aborted)
    connections.received(3, 1)  # its next head begins, and does not end
    connections.sweep(now + 7.0)
    assert idle.is_aborted and not busy.is_aborted
