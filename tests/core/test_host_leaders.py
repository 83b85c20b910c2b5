"""Who carries what between hosts: the same for all who ask, one for each host, and as even as primaries are."""

from __future__ import annotations

import collections

import msgspec
import pytest

from syncline.config import JobConfig
from syncline.core.members import Member
from syncline.core.replica_sets import ReplicaSet
from syncline.core.ring import host_leaders_of

RING = JobConfig(exchange="ring", workers=4)


def seats_of(servers: list[str], num_slices: int) -> dict[int, ReplicaSet]:
    """As they are made: primaries in turn."""
    found = {}
    for number in range(num_slices):
        primary = servers[number % len(servers)]
        found[number] = ReplicaSet(number, primary, tuple(name for name in servers if name != primary))
    return found


def members_of(hosts: dict[str, str], num_cores: int = 64, cores: str = "") -> list[Member]:
    return [Member(name, name[:6], 1, host, cores=cores, num_cores=num_cores) for name, host in hosts.items()]


@pytest.mark.parametrize("on", ["aa", "aaaa", "aabb", "abab", "abbb", "aabbcc", "abcabc", "aaab", "aabc"])
def test_every_host_has_one_leader_of_each_slice_and_they_are_even(on: str) -> None:
    hosts = {f"server-{rank}": host for rank, host in enumerate(on)}
    replica_sets = seats_of(list(hosts), 24 * len(on))
    found = host_leaders_of(RING, replica_sets, members_of({**hosts, "worker-0": "elsewhere"}))
    assert found is not None
    counts: collections.Counter[str] = collections.Counter()
    for number, replica_set in replica_sets.items():
        host_leaders = found.of(number)
        assert list(host_leaders) == sorted(set(on)), "one for each, in the order of hosts"
        assert all(hosts[name] == host for host, name in host_leaders.items())
        assert host_leaders[hosts[replica_set.primary]] == replica_set.primary == found.primary(number)
        counts.update(host_leaders.values())
    for host in set(on):
        shares = [counts[name] for name, where in hosts.items() if where == host]
        assert max(shares) - min(shares) <= 24, f"host {host}: {shares}"
    assert found.local_peers("server-0") == [n for n, host in hosts.items() if host == on[0] and n != "server-0"]
    assert found.host_of("worker-1") == found.host_of("server-1") == on[1] and not found.host_of("worker-99")


@pytest.mark.parametrize(
    ("on", "settings"),
    [
        ("ab", {}), ("a", {}), ("aabb", {"exchange": "servers"}), ("aabb", {"sums": "gloo"}),
        ("aabb", {"codec": "bf16"}), ("aabb", {"pull_codec": "bf16"}), ("aabb", {"transport": "tcp"}),
    ],
)  # fmt: skip
def test_where_sums_go_straight(on: str, settings: dict[str, str]) -> None:
    hosts = {f"server-{rank}": host for rank, host in enumerate(on)}
    config = JobConfig(**{"exchange": "ring", "workers": len(on), **settings})  # type: ignore[arg-type]
    assert host_leaders_of(config, seats_of(list(hosts), 8), members_of(hosts)) is None


@pytest.mark.parametrize(
    ("on", "num_cores", "cores", "is_straight"),
    [
        ("aa", 4, "", False), ("aa", 3, "", True), ("aaaa", 8, "", False), ("aaaa", 7, "", True),
        ("aaaa", 2, "0-1", False), ("aaaa", 1, "0", True), ("aabb", 1, "", False), ("aa", 0, "", True),
    ],
)  # fmt: skip
def test_on_one_host_it_takes_cores_to_spare(on: str, num_cores: int, cores: str, is_straight: bool) -> None:
    """Two for each process, its own or shared; between hosts sums are waited for in any case."""
    hosts = {f"server-{rank}": host for rank, host in enumerate(on)}
    found = host_leaders_of(RING, seats_of(list(hosts), 8), members_of(hosts, num_cores, cores))
    assert (found is None) == is_straight


def test_one_with_fewer_cores_counts_for_all() -> None:
    """It was started within a cpuset, say: then sums would wait for it."""
    hosts = {f"server-{rank}": "a" for rank in range(2)}
    first, second = members_of(hosts)
    few = msgspec.structs.replace(second, num_cores=1)
    assert host_leaders_of(RING, seats_of(list(hosts), 8), [first, few]) is None


def test_a_slice_without_copies_has_its_primary_alone() -> None:
    hosts = {f"server-{rank}": host for rank, host in enumerate("aab")}
    replica_sets = {**seats_of(list(hosts), 2), 2: ReplicaSet(2, "server-0"), 3: ReplicaSet(3, "")}
    found = host_leaders_of(RING, replica_sets, members_of(hosts))
    assert found is not None and found.of(2) == {"a": "server-0"} and found.of(3) == {} == found.of(4)
