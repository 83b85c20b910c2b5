"""Policies by name, and the options that go with only some of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.config import JobConfig
from syncline.core.policy import Policy, parse_policy, policy_of
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "policy", "in_rounds"),
    [
        ("sync", Policy("sync"), True),
        ("async", Policy("async"), False),
        ("bounded:0", Policy("bounded", 0), False),
        ("bounded:4", Policy("bounded", 4), False),
        ("bounded:999999999", Policy("bounded", 999_999_999), False),
        ("bounded:4,damped", Policy("bounded", 4, is_damped=True), False),
        ("async,damped", Policy("async", is_damped=True), False),
        ("sync:spare=1", Policy("sync", spare=1), True),
    ],
)
def test_a_policy_is_read_and_written_alike(text: str, policy: Policy, in_rounds: bool) -> None:
    assert parse_policy(text) == policy
    assert str(policy) == text
    assert policy.in_rounds is in_rounds


@pytest.mark.parametrize(
    "text",
    ["fast", "", "Sync", "bounded", "bounded:", "bounded:-1", "bounded:x", "bounded:1.5", "bounded:²", "bounded:٣",
     "bounded: 1", "bounded:1:2", "sync:1", "async:", "bounded:4,", "bounded:4,fast", "async, damped",
     "async:damped", "bounded,damped", "async,damped,damped", "async:spare=1", "bounded:spare=1", "spare=1"],
)  # fmt: skip
def test_another_policy_lists_what_there_is(text: str) -> None:
    """`--policy bounded:-1` and `--policy fast` are typed by people: they get the list, not a traceback."""
    with pytest.raises(ConfigError) as caught:
        parse_policy(text)
    assert str(caught.value) == (
        f"policy = {text!r}: must be one of sync, sync:spare=N, bounded:K (K = 0, 1, 2, …), bounded:K,damped, async, "
        "async,damped, async:gather=N, async:gather=N,damped"
    )


def test_a_policy_of_thousands_of_characters_is_not_repeated_whole() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policy("bounded:" + "9" * 5000)
    assert len(str(caught.value)) < 250


def test_nothing_is_stale_in_sync() -> None:
    for text in ("sync,damped", "sync:spare=1,damped"):
        with pytest.raises(ConfigError, match=r"damped goes with bounded:K or async, e\.g\. bounded:4,damped"):
            parse_policy(text)


@pytest.mark.parametrize("number", ["", "0", "-1", "x", "1.5", "²", "9" * 5000])
def test_spare_is_a_number_of_workers(number: str) -> None:
    with pytest.raises(
        ConfigError, match=r"spare=N is the number of workers that a round does not wait for, at least 1"
    ):
        parse_policy(f"sync:spare={number}")


def test_a_round_needs_a_worker() -> None:
    assert policy_of(JobConfig(policy="sync:spare=3", workers=4)).spare == 3
    with pytest.raises(ConfigError, match=r"of 4 workers at least one must be in a round; say sync:spare=3 or less"):
        policy_of(JobConfig(policy="sync:spare=9", workers=4))
    with pytest.raises(ConfigError, match=r"of 2 workers at least one must be in a round; say sync:spare=1 or less"):
        policy_of(JobConfig(policy="sync:spare=2", workers=4, least_workers=2))
    with pytest.raises(ConfigError, match=r"of 1 worker at least one must be in a round; say more workers \(-w\)"):
        policy_of(JobConfig(policy="sync:spare=1"))
    assert policy_of(JobConfig(policy="sync:spare=1", workers=4, servers=2, replicas=2)).spare == 1


@given(st.integers(0, 10**9), st.integers(1, 10**9))
def test_what_is_staler_counts_less(staleness: int, more: int) -> None:
    """τ versions stale: 1/(1+τ); where the policy does not damp, always 1."""
    damped, plain = parse_policy("bounded:4,damped"), parse_policy("bounded:4")
    assert damped.damping(0) == 1.0 and damped.damping(1) == 0.5 and damped.damping(3) == 0.25
    assert 0 < damped.damping(staleness + more) < damped.damping(staleness) <= 1
    assert plain.damping(staleness) == 1.0


@pytest.mark.parametrize("policy", ["sync", "async", "bounded:2"])
def test_local_steps_leave_a_policy_as_it_is(policy: str) -> None:
    """Not `most_rounds`: with local steps --max-steps counts these, and rounds are fewer."""
    for every in (4, "auto"):
        assert policy_of(JobConfig(policy=policy, sync_every=every, max_steps=9)) == parse_policy(policy)


def test_a_window_needs_another_policy_than_sync() -> None:
    """In sync a worker has one open step: with more, its own commits would wait for each other's round."""
    with pytest.raises(ConfigError, match=r"--window 2 needs --policy bounded:K or async: in sync a worker has one"):
        policy_of(JobConfig(window=2))
    assert policy_of(JobConfig(policy="bounded:3", window=2)) == Policy("bounded", 3)
    assert policy_of(JobConfig(policy="async", window=2)) == Policy("async")
