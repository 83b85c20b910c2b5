"""The engine of jobs on Ray without Ray: a stand-in that does not answer, as a cluster whose head is away."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engines.test_agents import wait_until
from tests.patience import PATIENCE

from syncline.engines import ray_agents
from syncline.engines.hub import AgentMember, Hub
from syncline.engines.ray_agents import UNKNOWN_HOST, RayAgents
from syncline.engines.ray_cluster import SERVER, Room
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.lives import Lives
from syncline.launch.processes import MemberPlan
from syncline.net import tcp


class Group:
    """A placement group that Ray has no host for."""

    def wait(self, seconds: float) -> bool:
        return False


class StandIn(types.ModuleType):
    """The module `ray`, as far as the engine uses it. One of its calls may not return."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.hangs, self.is_asked, self.answers = "", threading.Event(), threading.Event()
        self.num_actors = self.num_removed = self.num_refused = 0
        self.is_away = False  # the cluster's head

    def call(self, name: str, result: Any = None) -> Any:
        if name == self.hangs:
            self.is_asked.set()
            assert self.answers.wait(2 * PATIENCE)
        return result

    def remote(self, cls: type) -> StandIn:
        return self

    def options(self, **_: Any) -> Any:
        def begin() -> Any:
            self.num_actors += 1
            look = types.SimpleNamespace(remote=lambda mark: f"look-{self.num_actors}")
            return self.call("actor", types.SimpleNamespace(look=look))

        return types.SimpleNamespace(remote=begin)

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return self.call("wait", ([], refs))  # type: ignore[no-any-return]

    def kill(self, actor: Any) -> None:
        self.call("kill")

    def nodes(self) -> list[Any]:
        return []

    def remove(self, group: Any) -> None:
        if self.is_away:
            self.num_refused += 1
            raise ConnectionError("the head does not answer")
        self.num_removed += 1

    def group(self, bundles: list[Any], strategy: str) -> Any:
        return self.call("group", Group())


class Cluster:
    """An engine with room for a worker and a server."""

    def __init__(self, ray: StandIn, mark: pathlib.Path) -> None:
        self.ray, self.said = ray, list[str]()
        sock = tcp.bind("127.0.0.1", 0)
        file = jobfile.new("127.0.0.1", sock.getsockname()[1], {"start_seconds": PATIENCE})
        self.hub = Hub(file, sock, self.said.append)
        rooms = {f"{role}-0": Room(role, ray.group([], ""), 0, SERVER, host="a") for role in ("worker", "server")}
        self.engine = RayAgents(
            self.hub, file, rooms, mark=mark, seconds=PATIENCE, most_workers=0, say=self.said.append
        )
        self._file = file
        self._started: list[AgentMember] = []

    def plan(self, name: str) -> MemberPlan:
        return MemberPlan(role=name.rpartition("-")[0], name=name, host="a", file=self._file)

    def start(self, name: str) -> AgentMember:
        process = self.engine.start(self.plan(name))
        assert isinstance(process, AgentMember)
        self._started.append(process)
        return process

    def close(self) -> None:
        self.ray.answers.set()
        self.hub.close(0)
        self.engine.close()
        for process in self._started:
            process.give_up("the test is over")
            process.output.close()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    strategies = types.SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **_: None)
    groups = types.SimpleNamespace(placement_group=made.group, remove_placement_group=made.remove)
    errors = {name: type(name, (Exception,), {}) for name in ("RayError", "RayTaskError", "RuntimeEnvSetupError")}
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setitem(sys.modules, "ray.util", types.ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups)
    monkeypatch.setitem(sys.modules, "ray.exceptions", types.SimpleNamespace(**errors))
    monkeypatch.setattr(ray_agents, "GROW_SECONDS", 0.2)
    monkeypatch.setattr(ray_agents, "END_SECONDS", 0.2)
    return made


@pytest.fixture
def cluster(ray: StandIn, tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(ray, tmp_path / "mark")) as made:
        yield made


def soon(what: Callable[[], Any]) -> Any:
    """What this returns, if it returns without a word of Ray."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(what()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert answers, "the launcher waits for Ray"
    return answers[0]


@pytest.mark.parametrize("hangs", ["wait", "actor", "group"])
def test_the_launcher_does_not_wait_for_a_cluster_whose_head_is_away(
    ray: StandIn, cluster: Cluster, hangs: str
) -> None:
    """Its thread is the one that hears Ctrl-C and SIGTERM. Ray's calls wait for the head, some without a deadline,
    and the watcher that makes them held the lock that each verb takes."""
    first = soon(lambda: cluster.start("worker-0"))
    wait_until(lambda: ray.num_actors == 1)
    ray.hangs = hangs
    if hangs == "group":
        soon(lambda: cluster.engine.scale("worker", {}))
    second = soon(lambda: cluster.start("server-0"))
    assert ray.is_asked.wait(PATIENCE)
    assert soon(lambda: cluster.engine.scale("worker", {"worker-0": "a"})) == UNKNOWN_HOST
    cluster.engine.stop(second, signal.SIGTERM)
    assert soon(lambda: cluster.engine.watch(second)) == -signal.SIGTERM
    assert soon(lambda: [cluster.engine.watch(first)]) == [None]
    soon(lambda: [cluster.engine.close()])


def test_room_that_was_given_back_while_ray_made_it_is_not_kept(ray: StandIn, cluster: Cluster) -> None:
    """The job grows, Ray is slow, and the member has left before its room is there."""
    ray.hangs = "group"
    cluster.engine.scale("worker", {})
    assert ray.is_asked.wait(PATIENCE)
    process = cluster.start("worker-1")
    cluster.engine.stop(process, signal.SIGTERM)
    assert cluster.engine.watch(process) == -signal.SIGTERM
    ray.answers.set()
    wait_until(lambda: ray.num_removed > 0)


def test_room_that_ray_did_not_take_back_is_given_back_later(
    ray: StandIn, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the cluster's head is away. It would be kept from all other jobs until this one ends."""
    monkeypatch.setattr(ray_agents, "AGAIN_SECONDS", 0.2)
    cluster.engine.scale("worker", {})
    process = cluster.start("worker-1")
    ray.is_away = True
    cluster.engine.stop(process, signal.SIGTERM)
    assert cluster.engine.watch(process) == -signal.SIGTERM
    wait_until(lambda: ray.num_refused > 1)
    assert ray.num_removed == 0
    ray.is_away = False
    wait_until(lambda: ray.num_removed == 1)


def test_a_job_that_cannot_begin_still_ends_in_order(ray: StandIn, cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """SIGTERM comes before the launcher has heard of a host with other versions: its members are all ended."""
    screen = types.SimpleNamespace(line=lambda *_: None, progress=lambda *_: None, verdict=lambda *_: None)
    lives = Lives(screen, tmp_path, cluster.engine, lambda: None)
    for name in ("worker-0", "server-0"):
        lives.begin(cluster.plan(name))
    cluster.hub.fail("host b has syncline 1.0, this host 2.0: install one version")
    lives.stop(0.1, asks=True)
    assert lives.alive() == []


def test_other_versions_are_named_once_at_the_start(cluster: Cluster) -> None:
    """A death for each try would say the same four times, and blame the member."""
    process = cluster.start("worker-0")
    assert cluster.engine.watch(process) is None
    cluster.hub.fail("host b has syncline 1.0, this host 2.0: install one version")
    with pytest.raises(ConfigError, match=r"host b has syncline 1\.0"):
        cluster.engine.watch(process)
    assert cluster.engine.watch(process) is None, "the launcher looks again while it ends the job"
