"""Rounds at several servers: each hears the workers in an order of its own, and they must not disagree."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.membership import Barriers
from syncline.core.policy import parse_policy
from syncline.core.rounds import Rounds

SERVERS = (0, 1)
#: What a worker does in its life: for each part between two barriers, so many commits and a rest, again and again.
Script = list[list[int]]


@dataclasses.dataclass
class Worker:
    """A worker's own side: what it still has to do, where it is, and which servers have not answered."""

    todo: list[str]
    clock: int = 0
    phase: int = 0
    last_inactive: bool = False
    turn: int = 0
    unanswered: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    asked: dict[int, int] = dataclasses.field(default_factory=dict)  # by server: where the slowest stands
    at_barrier: bool = False


def life(script: Script) -> list[str]:
    parts = [[word for count in part for word in ["commit"] * count + ["rest"]] for part in script]
    return [word for part in parts for word in [*part, "barrier"]] + ["leave"]


class Job:
    """Workers and servers with a network between them that keeps the order of each pair, and no other order."""

    def __init__(self, policy: str, scripts: list[Script], window: int, seed: int) -> None:
        self.chance, self.window = random.Random(seed), window
        self.workers = {f"worker-{k}": Worker(life(script)) for k, script in enumerate(scripts)}
        self.servers = [Rounds[None](parse_policy(policy), [(name, 1) for name in self.workers]) for _ in SERVERS]
        self.network: dict[tuple[str, int], list[tuple[str, int, int, int | None]]] = {
            (name, server): [] for name in self.workers for server in SERVERS
        }
        self.barriers = Barriers()
        self.parked: list[list[tuple[str, int]]] = [[] for _ in SERVERS]
        self.applied: list[list[tuple[tuple[str, int], ...]]] = [[] for _ in SERVERS]

    def run(self) -> None:
        while True:
            steps = [("act", name, 0) for name in self.workers if self.may_act(name)]
            steps += [("hear", name, server) for (name, server), sent in self.network.items() if sent]
            if not steps:
                break
            what, name, server = self.chance.choice(steps)
            if what == "act":
                self.act(name)
            else:
                self.hear(name, server)
        waits = [self.servers[s].may_answer(*commit)[1] for s in SERVERS for commit in self.parked[s]]
        todo = {name: worker.todo for name, worker in self.workers.items() if worker.todo}
        assert not todo, f"stuck: {waits or self.servers[0].waiting_reason()}; {todo}"

    def may_act(self, name: str) -> bool:
        worker = self.workers[name]
        if not worker.todo or worker.at_barrier or worker.asked:
            return False
        if worker.todo[0] == "commit":
            return len(worker.unanswered) <= self.window
        return not worker.unanswered and not any(self.network[name, server] for server in SERVERS)

    def act(self, name: str) -> None:
        """A worker's next deed, as the client does it: who comes back from a rest asks first where to stand."""
        worker = self.workers[name]
        word = worker.todo[0]
        if word == "commit" and worker.last_inactive:
            worker.asked = dict.fromkeys(SERVERS, -1)
            self.send(name, "ask", 0, None)
            return
        worker.todo.pop(0)
        if word == "commit":
            self.commit(name, None)
        elif word == "rest":
            worker.phase += worker.last_inactive
            worker.last_inactive = True
            self.send(name, "rest", 0, None)
        elif word == "barrier":
            worker.at_barrier = True
            self.send(name, "away", 0, None)
        else:
            self.send(name, "leave", 0, None)
            self.release_barriers()

    def commit(self, name: str, back_at: int | None) -> None:
        worker = self.workers[name]
        worker.phase, worker.last_inactive = worker.phase + worker.last_inactive, False
        worker.clock += 1
        worker.unanswered[worker.clock] = set(SERVERS)
        self.send(name, "commit", worker.clock, back_at)

    def send(self, name: str, word: str, clock: int, back_at: int | None) -> None:
        for server in SERVERS:
            self.network[name, server].append((word, clock, self.workers[name].phase, back_at))

    def hear(self, name: str, server: int) -> None:
        word, clock, phase, back_at = self.network[name, server].pop(0)
        worker, rounds = self.workers[name], self.servers[server]
        if word == "ask":
            worker.asked[server] = rounds.slowest()
            if min(worker.asked.values()) >= 0:
                most, worker.asked = max(worker.asked.values()), {}
                worker.todo.pop(0)
                self.commit(name, most)
            return
        if word == "commit":
            verdict = rounds.commit(name, 1, clock, phase, None, back_at)
        elif word == "leave":
            verdict = rounds.leave(name, 1)
        else:
            verdict = rounds.rest(name, 1, phase, at_barrier=word == "away")
        for each in verdict.apply:
            self.applied[server].append(tuple((c.worker, c.clock) for c in each))
            self.parked[server] += [(c.worker, c.clock) for c in each]
        self.answer(server)
        if word == "away" and not any(self.network[name, other] for other in SERVERS):
            worker.turn += 1
            self.barriers.arrive("end", worker.turn, name, worker.phase + worker.last_inactive)
            self.release_barriers()

    def answer(self, server: int) -> None:
        for commit in list(self.parked[server]):
            if self.servers[server].may_answer(*commit)[0]:
                self.parked[server].remove(commit)
                unanswered = self.workers[commit[0]].unanswered
                unanswered[commit[1]].discard(server)
                if not unanswered[commit[1]]:
                    del unanswered[commit[1]]

    def release_barriers(self) -> None:
        there = [name for name, worker in self.workers.items() if worker.todo]
        whole = self.barriers.ready(there)
        self.barriers.forget(whole)
        for phase in self.barriers.pass_all(whole):
            for name in there:
                worker = self.workers[name]
                worker.phase, worker.last_inactive, worker.at_barrier = phase, False, False


parts = st.lists(st.integers(0, 5), max_size=3)
scripts = st.lists(st.lists(parts, min_size=1, max_size=3), min_size=2, max_size=4)


@given(scripts, st.integers(0, 2**32))
def test_in_sync_every_server_applies_the_same_rounds(script: list[Script], seed: int) -> None:
    """Half of a round on one server and another half on the other would be a step that nobody computed. And
    another run, with another timing, has the same rounds: with uneven epochs, barriers, and workers that leave."""
    jobs = [Job("sync", script, 0, seed + more) for more in range(2)]
    for job in jobs:
        job.run()
    assert jobs[0].applied[0] == jobs[0].applied[1] == jobs[1].applied[0] == jobs[1].applied[1]


@given(scripts, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2**32))
def test_in_bounded_no_two_servers_make_two_workers_wait_for_each_other(
    script: list[Script], bound: int, window: int, seed: int
) -> None:
    """A worker comes back from a rest while others run. Were it set beside the slowest one of each server by
    itself, one server could have it ahead and the other behind: each of two workers would wait for the other."""
    job = Job(f"bounded:{bound}", script, window, seed)
    job.run()
    positions = [{s.name: s.position for s in server.standings.values()} for server in job.servers]
    assert positions[0] == positions[1], "where a worker stands is one number"


@pytest.mark.parametrize("policy", ["bounded:1", "async"])
def test_without_rounds_every_server_applies_every_commit_once(policy: str) -> None:
    script = [[[5, 3], [2]], [[2], [6]], [[4, 0], [1, 1]]]
    job = Job(policy, script, 1, 7)
    job.run()
    for applied in job.applied:
        for worker, each in enumerate(script):
            mine = [clock for ((name, clock),) in applied if name == f"worker-{worker}"]
            assert mine == list(range(1, sum(map(sum, each)) + 1))
