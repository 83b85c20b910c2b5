"""A ring: who belongs to whom, what follows from its workers, and what it excludes."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.config import JobConfig
from syncline.core.membership import JobState, Membership
from syncline.core.replica_sets import ReplicaSet
from syncline.core.ring import check_ring, partner_of, protection_of, ring_settings, trust_told
from syncline.core.settings import check_settings
from syncline.errors import ConfigError


def ring(workers: int = 2, **settings: Any) -> Membership:
    config = JobConfig(workers=workers, exchange="ring", **settings)
    return Membership(JobState(config=JobConfig(**{**vars_of(config), **ring_settings(config)})))


def vars_of(config: JobConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_trust_is_told_where_it_counts() -> None:
    gloo = JobConfig(workers=2, exchange="ring", sums="gloo", trust_network=True)
    assert trust_told(gloo, ["a", "b"]).startswith("--trust-network: gloo speaks between a, b in the clear")
    assert not trust_told(gloo, ["a", "a"]), "on one host it listens on loopback"
    assert not trust_told(JobConfig(workers=2, exchange="ring", trust_network=True), ["a", "b"])


def test_a_worker_and_its_server_have_one_number() -> None:
    assert partner_of("worker-3") == "server-3" and partner_of("server-12") == "worker-12"


def test_as_many_servers_as_workers_all_with_everything() -> None:
    assert ring_settings(JobConfig(workers=4)) == {"servers": 4, "replicas": 4, "ack": "replicated"}
    assert ring_settings(JobConfig(workers=1)) == {"servers": 1, "replicas": 1, "ack": "memory"}
    grows = JobConfig(workers=1, most_workers=8)
    assert ring_settings(grows) == {"servers": 1, "replicas": 2, "ack": "replicated"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "async"}, "--exchange ring and --policy async cannot be combined: .* use --policy sync, or --ex"),
        ({"policy": "bounded:4,damped"}, "--policy bounded:4,damped cannot be combined: .* use --policy sync"),
        ({"policy": "sync:spare=1"}, "--policy sync:spare=1 cannot be combined: .* or --exchange servers"),
        ({"window": 2}, "--exchange ring and --window 2 cannot be combined: .* leave --window out"),
        ({"server_device": "cuda:0"}, "--server-device cuda:0 cannot be combined: .* leave --server-device out"),
        ({"policy": "often"}, "policy = 'often': must be one of sync"),
    ],
)
def test_what_excludes_each_other_says_what_to_use(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(JobConfig(workers=3, exchange="ring", **settings))


def test_with_servers_all_of_that_is_fine() -> None:
    check_ring(JobConfig(policy="async", window=2, server_device="cuda"))
    check_settings(JobConfig(workers=3, exchange="ring", sync_every=4, codec="bf16"))


def test_what_a_death_costs() -> None:
    config = JobConfig(workers=2, exchange="ring", replicas=2)
    text = protection_of(config, ["local", "local"])
    assert text == "survives the death of all workers but one, but not of this host: all workers are on it"
    assert "a whole host can tear one step" in protection_of(config, ["a", "b"])
    assert "no other process has a copy" in protection_of(config, ["a"])
    assert "1 of 2 slices" in protection_of(
        config, ["a", "b"], [ReplicaSet(0, "server-0"), ReplicaSet(1, "server-1", "server-0")]
    )
    assert protection_of(JobConfig(replicas=1), ["a"]).startswith("if a server dies")


# -- who is in --------------------------------------------------------------------------------------------


def test_names_that_nobody_chose_are_paired_by_the_process() -> None:
    """Two workers by hand, whose four questions come in any order."""
    members = ring()
    joins = [("server", "p"), ("worker", "q"), ("worker", "p"), ("server", "q")]
    names = [members.join(role, "", "here", None, process=process).name for role, process in joins]
    assert names == ["server-0", "worker-1", "worker-0", "server-1"]
    assert members.may_form(False)
    assert members.join("worker", "", "here", None, process="p").name == "worker-0", "it asks again"
    assert members.beside("worker-1") == "server-1" and members.beside("server-0") == "worker-0"


def test_it_begins_when_every_worker_has_its_server() -> None:
    members = ring(workers=3, least_workers=1, most_workers=3)
    members.join("worker", "worker-1", "here", None, process="p")
    members.join("server", "server-0", "here", None, process="q")
    assert not members.may_form(True), "worker-1 has no server yet"
    members.join("server", "server-1", "here", None, process="p")
    assert members.may_form(True) and not members.may_form(False)


def test_a_new_process_of_a_name_is_not_beside_the_old_one() -> None:
    members = ring()
    for name, process in (("worker-0", "p"), ("server-0", "p"), ("worker-1", "q"), ("server-1", "q")):
        members.join(name.rpartition("-")[0], name, "here", None, process=process)
    members.form()
    members.evict("server-1", "is gone")
    members.join("server", "server-1", "here", None, process="r")
    assert members.beside("worker-1") == "" and members.beside("server-1") == ""
    with pytest.raises(ConfigError, match="no worker worker-2 is expected"):
        members.join("worker", "worker-2", "here", None)


def test_with_servers_nobody_is_beside_anybody() -> None:
    members = Membership(JobState(config=JobConfig(workers=1, servers=1)))
    members.join("worker", "worker-0", "here", None, process="p")
    members.join("server", "server-0", "here", None, process="q")
    assert members.beside("worker-0") == ""


def test_a_process_that_has_not_come_is_named_once() -> None:
    """Nobody starts servers in a ring: who waits for one waits for its worker's process."""
    membership = ring(2)
    assert membership.missing() == ["worker-0", "worker-1"]
    membership.join("worker", "worker-0", "here", None)
    assert membership.missing() == ["server-0", "worker-1"]
