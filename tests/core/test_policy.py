"""Policies by name, and the options that go with only some of them."""

from __future__ import annotations

import re

import pytest

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
    ],
)
def test_a_policy_is_read_and_written_alike(text: str, policy: Policy, in_rounds: bool) -> None:
    assert parse_policy(text) == policy
    assert str(policy) == text
    assert policy.in_rounds is in_rounds


@pytest.mark.parametrize(
    "text",
    ["fast", "", "Sync", "bounded", "bounded:", "bounded:-1", "bounded:x", "bounded:1.5", "bounded:²", "bounded:٣",
     "bounded: 1", "bounded:1:2", "sync:1", "async:", "bounded:" + "9" * 5000],
)  # fmt: skip
def test_another_policy_lists_what_there_is(text: str) -> None:
    """`--policy bounded:-1` and `--policy fast` are typed by people: they get the list, not a traceback."""
    with pytest.raises(ConfigError) as caught:
        parse_policy(text)
    assert str(caught.value) == f"policy = {text!r}: there are sync, bounded:K (K = 0, 1, 2, …), async"


@pytest.mark.parametrize("policy", ["async", "bounded:2"])
def test_sync_every_needs_sync(policy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--sync-every 4 needs --policy sync; this job has {policy}")):
        policy_of(JobConfig(policy=policy, sync_every=4))
    assert policy_of(JobConfig(policy="sync", sync_every=4)) == Policy("sync")


def test_a_window_needs_another_policy_than_sync() -> None:
    """In sync a worker has one open clock: with more, its own commits would wait for each other's round."""
    with pytest.raises(ConfigError, match=r"--window 2 needs --policy bounded:K or async: in sync a worker has one"):
        policy_of(JobConfig(window=2))
    assert policy_of(JobConfig(policy="bounded:3", window=2)) == Policy("bounded", 3)
    assert policy_of(JobConfig(policy="async", window=2)) == Policy("async")
