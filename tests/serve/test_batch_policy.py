"""When waiting requests become a batch, without a clock or a thread."""

from __future__ import annotations

import pytest

from syncline.serve.batch_policy import BatchPolicy


def test_an_idle_server_never_waits() -> None:
    policy = BatchPolicy(max_rows=32, max_delay=0.005)
    assert policy.wait_seconds(1, oldest=10.0, now=10.0) == 0.0
    for num_rows in (1, 6):
        policy.taken(num_rows)
        policy.finished(num_rows, num_waiting=0)
        assert policy.wait_seconds(1, oldest=11.0, now=11.0) == 0.0


def test_a_busy_server_waits_for_as_many_as_came_lately_and_not_longer_than_the_delay() -> None:
    policy = BatchPolicy(max_rows=32, max_delay=0.005)
    policy.taken(6)
    policy.finished(6, num_waiting=4)
    assert policy.wait_seconds(4, oldest=1.0, now=1.001) == pytest.approx(0.004)
    assert policy.wait_seconds(10, oldest=1.0, now=1.001) == 0.0
    assert policy.wait_seconds(4, oldest=1.0, now=1.005) == 0.0


def test_those_that_did_not_come_are_not_expected_again() -> None:
    """Else every request of a client that is alone now would wait for those that went away."""
    policy = BatchPolicy(max_rows=32, max_delay=0.005)
    policy.finished(6, num_waiting=4)
    policy.taken(4)  # the delay has passed
    assert policy.wait_seconds(4, oldest=2.0, now=2.0) == 0.0


def test_a_full_batch_does_not_wait() -> None:
    policy = BatchPolicy(max_rows=8, max_delay=1.0)
    policy.finished(8, num_waiting=56)
    assert policy.wait_seconds(8, oldest=1.0, now=1.0) == 0.0
    assert policy.wait_seconds(7, oldest=1.0, now=1.0) > 0.0
