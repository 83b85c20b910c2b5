"""How many workers, how many replicas, and what an acknowledgement means: settled before anything starts."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from syncline import config as configuration
from syncline.core.replica_sets import protection
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.hosts import assign, parse_workers, quietest, settle_workers
from syncline.launch.running import Plans, Script, engine_of, settle_here, settle_name, settle_servers


def test_a_number_of_workers_or_the_least_and_the_most() -> None:
    assert parse_workers("4") == {"workers": 4, "least_workers": 0, "most_workers": 0}
    assert parse_workers("2:8") == {"workers": 0, "least_workers": 2, "most_workers": 8}
    for text in ("many", "8:2", "0:4", ":4", "2:", "2:8:9", ""):
        with pytest.raises(ConfigError, match="give a number of workers, or the least and the most"):
            parse_workers(text)


@pytest.mark.parametrize(
    ("gpus", "cores", "workers"), [(0, 1, 2), (0, 4, 4), (0, 64, 8), (3, 64, 3), (16, 64, 8), (1, 64, 2)]
)
def test_it_starts_with_what_is_there(monkeypatch: Any, gpus: int, cores: int, workers: int) -> None:
    """As many as there are GPUs, else cores, within the least and the most."""
    monkeypatch.setattr(configuration, "num_gpus", lambda: gpus)
    monkeypatch.setattr(configuration, "num_cores", lambda: cores)
    assert settle_workers(parse_workers("2:8"))["workers"] == workers
    assert settle_workers({"least_workers": 3, "most_workers": 3})["workers"] == 3


def test_with_hosts_as_many_as_they_have() -> None:
    assert settle_workers({"hosts": "a:4,b:2"})["workers"] == 6
    assert settle_workers({"hosts": "a:4,b:2", **parse_workers("6")})["workers"] == 6
    assert settle_workers({"hosts": "a:4,b:2", **parse_workers("2:8")})["workers"] == 6
    for text in ("3", "7:8", "2:5", "0"):
        with pytest.raises(ConfigError, match=r"-w .* and -H a:4,b:2 \(6 workers\) cannot be combined"):
            settle_workers({"hosts": "a:4,b:2", **(parse_workers(text))})


def test_a_number_outside_of_its_own_bounds() -> None:
    with pytest.raises(ConfigError, match="workers = 9: least_workers = 2 and most_workers = 8 exclude this"):
        settle_workers({"workers": 9, "least_workers": 2, "most_workers": 8})
    assert settle_workers({"workers": 0}) == {"workers": 0}  # refused by its limits


def test_servers_go_to_hosts_of_their_own() -> None:
    """As on Ray, which spreads them: what was named decides about replicas too."""
    config = configuration.resolve({"workers": 2, "servers": 3, "hosts": "a:2", "server_hosts": "b,c"})
    found = assign(config)
    assert {name: host for name, host in found.items() if name.startswith("server")} == {
        "server-0": "b", "server-1": "c", "server-2": "b",
    }  # fmt: skip
    assert found["worker-0"] == found["worker-1"] == "a"


def settled(hosts: list[str], **given: Any) -> tuple[int, str]:
    found = settle_servers(given, configuration.resolve({"servers": len(hosts), **given}), hosts)
    return found["replicas"], found["ack"]


def test_replicas_follow_from_the_hosts_and_acknowledgements_from_the_replicas() -> None:
    assert settled(["local"]) == settled(["local", "local"]) == (1, "memory")
    assert settled(["a", "b"]) == (2, "replicated")
    assert settled(["a", "b"], replicas=1) == settled(["a", "b"], ack="memory") == (1, "memory")
    assert settled(["local", "local"], replicas=2) == settled(["local"] * 2, ack="replicated") == (2, "replicated")


@pytest.mark.parametrize(
    ("hosts", "given", "message"),
    [
        (["local"], {"replicas": 2}, "--replicas 2 needs two servers or more; this job has 1: use -s 2"),
        (["local"], {"ack": "replicated"}, "--ack replicated needs two servers or more; this job has 1: use -s 2"),
        (
            ["a", "b"],
            {"replicas": 1, "ack": "replicated"},
            "--ack replicated and --replicas 1 cannot be combined; use --ack memory",
        ),
        (
            ["a", "b"],
            {"replicas": 2, "ack": "memory"},
            "--ack memory and --replicas 2 cannot be combined; use --ack replicated",
        ),
        (["a"], {"ack": "disk"}, "ack = 'disk': must be one of memory, replicated"),
    ],
)
def test_what_cannot_be_promised_is_refused(hosts: list[str], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(hosts, **given)
    assert str(caught.value) == message


def test_what_a_servers_death_would_cost() -> None:
    assert protection(2, ["a", "b"]) == (
        "survives the death of any one server; the loss of a whole host can tear one step"
    )
    assert protection(2, ["a", "a"]) == (
        "survives the death of any one server, but not of this host: all servers are on it"
    )
    assert "if a server dies, its newest updates and optimizer state are lost" in protection(1, ["a", "b"])
    assert "-s 2 --replicas 2" in protection(1, ["a"]), "and what helps"


def test_one_more_goes_to_the_host_with_the_fewest() -> None:
    config = configuration.resolve({"hosts": "a:3,b:2", "workers": 5, "servers": 2})
    plans = Plans(
        jobfile.new("127.0.0.1", 1, {}), config, Script(path="train.py", arguments=["-x"]), 7, engine_of(config, None)
    )
    first = {plan.name: plan for plan in plans.first()}
    where = {name: plan.host for name, plan in first.items() if plan.role != "coordinator"}
    assert quietest("worker", where, ["a", "b"]) == "b" and quietest("server", where, ["a", "b"]) == "a"
    more = plans.another("worker-5", where)
    assert (more.name, more.role, more.host, more.script, more.num_local_workers) == (
        "worker-5", "worker", "b", "train.py", 3,
    )  # fmt: skip
    assert plans.another("server-2", where).script == "train.py", "servers import what is beside it"
    assert quietest("worker", {"worker-0": "elsewhere"}, ["a"]) == "a"


# -- a ring -----------------------------------------------------------------------------------------------


def test_in_a_ring_servers_follow_the_workers_and_have_no_processes() -> None:
    given, config = settle_here({"workers": 3, "exchange": "ring"})
    assert (config.servers, config.replicas, config.ack) == (3, 3, "replicated")
    plans = Plans(jobfile.new("h", 1, given), config, Script(path="train.py"), 3, engine_of(config, None)).first()
    assert [plan.name for plan in plans] == ["coordinator", "worker-0", "worker-1", "worker-2"]
    assert [plan.num_local_workers for plan in plans] == [0, 3, 3, 3]


def test_in_a_ring_a_server_is_on_its_workers_host_and_shares_its_cores() -> None:
    said = {"hosts": "a:2,b:1", "exchange": "ring", "cores": "auto"}
    given, config = settle_here(said)
    where = assign(config)
    assert [where[f"server-{k}"] for k in range(3)] == [where[f"worker-{k}"] for k in range(3)] == ["a", "a", "b"]
    plans = Plans(jobfile.new("h", 1, given), config, Script(path="train.py"), 3, engine_of(config, None)).first()
    assert [plan.place for plan in plans[1:]] == [(0, 0, 2), (1, 0, 2), (0, 0, 1)]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"servers": 1}, "--exchange ring and -s 1 cannot be combined"),
        ({"replicas": 2}, "--exchange ring and --replicas 2 cannot be combined"),
        ({"ack": "memory"}, "--exchange ring and --ack memory cannot be combined"),
        ({"policy": "bounded:2"}, "use --policy sync, or --exchange servers"),
    ],
)
def test_what_a_ring_excludes_is_said_at_launch(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle_here({"workers": 2, "exchange": "ring", **said})


def test_jobs_that_start_in_the_same_second_have_folders_of_their_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had one name: the second was refused, or took the first one's logs away."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20250101-120000")
    names = [settle_name(*settle_here({}), Script(path="train.py"))[1].name for _ in range(3)]
    assert names == ["train-20250101-120000", "train-20250101-120000-2", "train-20250101-120000-3"]
    said = settle_here({"name": "train-20250101-120000"})
    assert settle_name(*said, Script(path="train.py"))[1].name == names[0], "as it is said"
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"the folder file/train-.* cannot be used: Not a directory; use another: --runs"
    ):
        settle_name(*settle_here({"runs": "file"}), Script(path="train.py"))
