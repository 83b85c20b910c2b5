"""When waiting requests become a batch, without a clock or a thread."""

from __future__ import annotations

import pytest

from syncline.serve.batch_policy import BatchPolicy


def policy(max_rows: int = 32, max_delay: float = 0.005) -> BatchPolicy:
    return BatchPolicy(max_rows, max_delay)


def test_an_idle_server_never_waits() -> None:
    """Neither at its first request nor at one that comes some time after a batch, whatever that batch was."""
    idle = policy()
    assert idle.wait_seconds(1, oldest=10.0, now=10.0) == 0.0
    for num_rows in (1, 6):
        idle.taken(num_rows)
        idle.finished(num_rows, num_waiting=0, seconds=0.02, now=10.0)
        assert idle.wait_seconds(1, oldest=10.006, now=10.006) == 0.0


def test_a_client_that_is_alone_never_waits() -> None:
    """However soon it asks again."""
    alone = policy()
    alone.taken(1)
    alone.finished(1, num_waiting=0, seconds=0.02, now=1.0)
    assert alone.wait_seconds(1, oldest=1.0001, now=1.0001) == 0.0


def test_a_busy_server_waits_for_as_many_as_came_lately_and_not_longer_than_the_delay() -> None:
    """The delay begins with the end of the batch before: until then a request did not wait for others."""
    busy = policy()
    busy.taken(6)
    busy.finished(6, num_waiting=4, seconds=0.02, now=1.0)
    assert busy.wait_seconds(4, oldest=0.99, now=1.001) == pytest.approx(0.004)
    assert busy.wait_seconds(10, oldest=0.99, now=1.001) == 0.0
    assert busy.wait_seconds(4, oldest=0.99, now=1.005) == 0.0


def test_clients_that_were_all_answered_are_waited_for_too() -> None:
    """Else the first of them that asks again would be a batch of its own, and the others would wait for that."""
    busy = policy()
    busy.taken(6)
    busy.finished(6, num_waiting=0, seconds=0.02, now=1.0)
    assert busy.wait_seconds(1, oldest=1.001, now=1.001) == pytest.approx(0.005)
    assert busy.wait_seconds(6, oldest=1.001, now=1.002) == 0.0


def test_no_wait_is_longer_than_the_call_before() -> None:
    """A call of 1 ms is not worth 5 ms of waiting."""
    quick = policy()
    quick.finished(6, num_waiting=4, seconds=0.001, now=1.0)
    assert quick.wait_seconds(4, oldest=0.99, now=1.0) == pytest.approx(0.001)
    assert quick.wait_seconds(4, oldest=0.99, now=1.001) == 0.0


def test_those_that_did_not_come_are_not_expected_again() -> None:
    """Else every request of a client that is alone now would wait for those that went away."""
    left = policy()
    left.finished(6, num_waiting=4, seconds=0.02, now=2.0)
    left.taken(4)  # the delay has passed
    assert left.wait_seconds(4, oldest=2.0, now=2.0) == 0.0


def test_a_full_batch_does_not_wait() -> None:
    full = policy(max_rows=8, max_delay=1.0)
    full.finished(8, num_waiting=56, seconds=2.0, now=1.0)
    assert full.wait_seconds(8, oldest=1.0, now=1.0) == 0.0
    assert full.wait_seconds(7, oldest=1.0, now=1.0) > 0.0
