"""Spare workers and several servers: one closes the rounds, the others follow it, and all have the same members."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.members import Standing, merged
from syncline.core.policy import Policy
from syncline.core.rounds import RoundMembership, RoundMemberships, Rounds, Verdict, after_barrier, unanswered
from syncline.errors import ProtocolError

Members = tuple[tuple[str, int], ...]


def rounds_of(num_workers: int, spare: int = 1, *, decides: bool = False) -> Rounds[str]:
    rounds: Rounds[str] = Rounds(Policy("sync", spare=spare), [(f"worker-{k}", 10 + k) for k in range(num_workers)])
    rounds.decides, rounds.is_alone = decides, False
    return rounds


def commit(rounds: Rounds[str], worker: int, clock: int, phase: int = 0) -> Verdict[str]:
    return rounds.commit(f"worker-{worker}", 10 + worker, clock, phase, "")


def applied(verdict: Verdict[str]) -> list[Members]:
    return [tuple((c.worker, c.clock) for c in each) for each in verdict.apply]


def told(rounds: Rounds[str], worker: int, clock: int) -> RoundMembership:
    round_membership = rounds.membership_to_tell(f"worker-{worker}", 10 + worker, clock)
    assert round_membership is not None
    return round_membership


# -- what is known of rounds ---------------------------------------------------------------------------------


def test_of_every_worker_the_last_word_is_kept() -> None:
    first = RoundMembership(0, 1, [("worker-0", 10, 1), ("worker-1", 11, 1)])
    second = RoundMembership(0, 2, [("worker-0", 10, 2)], [("worker-2", 12, 1)])
    round_memberships = RoundMemberships([second, first, first])
    assert round_memberships.newest == second and round_memberships.entries() == [first, second]
    assert round_memberships.find("worker-0", 10, 1) is None, "it was answered by all, else it had not gone on"
    assert round_memberships.find("worker-1", 11, 1) == first and round_memberships.find("worker-2", 12, 1) == second
    round_memberships.learn(RoundMembership(0, 3, [("worker-1", 15, 1)]))
    assert first not in round_memberships.entries(), "another life of that name: what was of the first is settled"


# -- those who follow ----------------------------------------------------------------------------------------


def test_a_round_is_applied_when_all_who_are_in_it_have_committed_here() -> None:
    here, there = rounds_of(3, decides=True), rounds_of(3)
    commit(here, 0, 1)
    assert applied(commit(here, 2, 1)) == [(("worker-0", 1), ("worker-2", 1))]
    with pytest.raises(ProtocolError, match="whose round is not known"):
        commit(there, 2, 1)
    there.learn(told(here, 2, 1))
    first = commit(there, 2, 1)
    assert applied(first) == [] and first.reason == "the round waits for worker-0"
    assert applied(commit(there, 0, 1)) == [(("worker-0", 1), ("worker-2", 1))], "by anybody's word"


def test_who_was_late_there_is_late_here_and_goes_on_from_the_same_place() -> None:
    here, there = rounds_of(3, decides=True), rounds_of(3)
    for clock in (1, 2):
        for worker in (0, 1):
            commit(here, worker, clock)
    assert commit(here, 2, 1).kind == "late"
    there.learn(told(here, 2, 1))
    late = commit(there, 2, 1)
    assert (late.kind, applied(late)) == ("late", [(("worker-2", 1),)])
    assert there.standings["worker-2"].turn() == here.standings["worker-2"].turn() == (0, 2)
    assert commit(there, 2, 1).kind == "late", "also when it is said again"


def test_what_is_open_and_in_no_closed_round_counts_nowhere_when_its_worker_dies() -> None:
    here = rounds_of(3, decides=True)
    commit(here, 0, 1)
    here.fence("worker-0", 10)
    here.drop_undecided("worker-0", 10)
    here.drop_undecided("worker-0", 10)  # prepared again
    assert here.standings["worker-0"].clock == 0 and not list(here.open_commits())
    commit(here, 1, 1)
    assert applied(commit(here, 2, 1)) == [(("worker-1", 1), ("worker-2", 1))]


def test_what_is_in_a_closed_round_counts_also_when_its_worker_dies() -> None:
    here, there = rounds_of(3, decides=True), rounds_of(3)
    for worker in (0, 1):
        commit(here, worker, 1)
    there.learn(told(here, 1, 1))
    commit(there, 1, 1)
    there.fence("worker-0", 10)
    there.drop_undecided("worker-0", 10)
    there.drop_undecided("worker-1", 11)
    assert there.is_decided("worker-0", 10, 1) and not there.is_decided("worker-2", 12, 1)
    assert applied(there.settle("worker-0", 1, 0, "")) == [(("worker-0", 1), ("worker-1", 1))]


def test_who_is_gone_and_cannot_be_settled_is_not_waited_for() -> None:
    """A worker and a server lost in one step: that is printed, and the others go on."""
    here, there = rounds_of(3, decides=True), rounds_of(3)
    for worker in (0, 1):
        commit(here, worker, 1)
    there.learn(told(here, 1, 1))
    assert applied(commit(there, 1, 1)) == []
    there.fence("worker-0", 10)
    assert applied(there.leave_fenced("worker-0", 10)) == [(("worker-1", 1),)]


# -- the one that decides ------------------------------------------------------------------------------------


def test_a_round_is_closed_when_somebody_of_the_one_before_has_gone_on() -> None:
    """Else rounds without anybody in common could come in another order to another server."""
    here = rounds_of(4, spare=3, decides=True)
    assert applied(commit(here, 0, 1)) == [(("worker-0", 1),)]
    assert commit(here, 1, 1).kind == "late"
    waits = commit(here, 1, 2)
    assert applied(waits) == [] and waits.reason == "the round waits for worker-0"
    assert here.missing() == ["worker-0"]
    assert applied(here.rest("worker-0", 10, 0)) == [(("worker-1", 2),)], "who rests was answered by all servers"
    alone = rounds_of(4, spare=3, decides=True)
    alone.is_alone = True
    assert applied(commit(alone, 0, 1)) == [(("worker-0", 1),)]
    commit(alone, 1, 1)
    assert applied(commit(alone, 1, 2)) == [(("worker-1", 2),)], "with one server nobody has to be asked"


def test_while_primaries_change_no_round_is_closed() -> None:
    """Others may have dropped what was staged for it."""
    here = rounds_of(3, decides=True)
    commit(here, 0, 1)
    here.decides = False
    assert applied(here.leave("worker-1", 11)) == []
    here.decides = True
    assert applied(here.release()) == [(("worker-0", 1),)]


def test_nobody_who_is_gone_is_waited_for() -> None:
    standings = {"worker-0": Standing("worker-0", 10, clock=1), "worker-1": Standing("worker-1", 21)}
    round_membership = RoundMembership(0, 1, [("worker-0", 10, 1), ("worker-1", 11, 1), ("worker-2", 12, 1)])
    assert unanswered(round_membership, standings) == ["worker-0"]
    standings["worker-0"].left = True
    assert unanswered(round_membership, standings) == [] and unanswered(None, standings) == []


def test_with_all_of_a_round_dead_it_comes_first_on_the_others_all_the_same() -> None:
    """The one that decides has installed that they are out, the other has not: it knows nothing of their round."""
    here, there = rounds_of(3, spare=2, decides=True), rounds_of(3, spare=2)
    assert applied(commit(here, 0, 1)) == [(("worker-0", 1),)]
    assert commit(here, 1, 1).kind == "late"
    commit(here, 1, 2)
    for rounds in (here, there):
        rounds.fence("worker-0", 10)
    assert applied(here.leave_fenced("worker-0", 10)) == [(("worker-1", 2),)]
    round_membership = told(here, 1, 2)
    assert round_membership.before is not None and round_membership.before.members == [("worker-0", 10, 1)]
    there.standings["worker-1"].clock = 1
    there.learn(round_membership)
    waits = commit(there, 1, 2)
    assert applied(waits) == [] and waits.reason == "the round waits for worker-0"
    assert applied(there.settle("worker-0", 1, 0, "")) == [(("worker-0", 1),), (("worker-1", 2),)]
    commit(here, 1, 3)
    assert told(here, 1, 3).before is None, "it has gone on, so all servers have the last one"


def test_a_round_before_a_barrier_holds_nobody_up_behind_it() -> None:
    here = rounds_of(3, spare=2, decides=True)
    assert applied(commit(here, 0, 1)) == [(("worker-0", 1),)]
    for worker in range(3):
        here.rest(f"worker-{worker}", 10 + worker, 0, at_barrier=True)
    assert applied(commit(here, 2, 1, after_barrier(0))) == [(("worker-2", 1),)]
    assert told(here, 2, 1).before is None


def test_who_has_registered_less_is_not_waited_for_where_it_tells_nothing() -> None:
    here, there, third = rounds_of(3, decides=True), rounds_of(3), rounds_of(3)
    there.first_segment, third.first_segment = 1, 0
    for worker, number in enumerate((2, 1, 2)):
        here.standings[f"worker-{worker}"].num_segments = number
    commit(here, 0, 1)
    commit(here, 1, 1)
    round_membership = told(here, 0, 1)
    assert round_membership.told_less == [("worker-1", 1)]
    for rounds in (there, third):
        rounds.learn(round_membership)
    assert applied(commit(third, 0, 1)) == [], "what that one has registered is here, too"
    commit(here, 2, 1)
    commit(here, 1, 2)
    waits = commit(here, 2, 2)
    assert applied(waits) == [] and waits.reason == "the round waits for worker-0", "worker-1 has not told all"
    assert applied(commit(there, 0, 1)) == [(("worker-0", 1),)]
    assert applied(commit(here, 0, 2)) == [(("worker-0", 2), ("worker-1", 2), ("worker-2", 2))]


def test_what_a_round_waits_for_in_words() -> None:
    here, there = rounds_of(4, spare=2, decides=True), rounds_of(4, spare=2)
    assert commit(here, 0, 1).reason == "the round waits for worker-1, worker-2, worker-3, all but 2 of them"
    commit(here, 1, 1)
    for worker in (2, 3):
        commit(here, worker, 1)
        commit(here, worker, 2)
    assert here.waiting_reason() == "the round waits for worker-0, worker-1, one of them"
    there.learn(RoundMembership(0, 1, [(f"worker-{k}", 10 + k, 1) for k in range(4)]))
    assert commit(there, 0, 1).reason == "the round waits for worker-1, worker-2, worker-3"


def test_another_that_decides_from_now_on_keeps_to_what_any_server_knows() -> None:
    """Some slices have the round, others do not: whoever comes first, the same are in it, and the same were late."""
    here, there = rounds_of(4, decides=True), rounds_of(4)
    for worker in (0, 1, 2):
        commit(here, worker, 1)
    assert commit(here, 3, 1).kind == "late"
    for worker in (0, 3):
        there.learn(told(here, worker, 1))
    there.decides = True
    standings = merged([there.standings.values()]).values()
    there.reset(standings, {("worker-3", 13): 0})
    late = commit(there, 3, 1)
    assert (late.kind, applied(late)) == ("late", [(("worker-3", 1),)])
    assert applied(commit(there, 3, 2)) == [], "in the next round"
    assert applied(commit(there, 1, 1)) == applied(commit(there, 0, 1)) == []
    assert applied(commit(there, 2, 1)) == [(("worker-0", 1), ("worker-1", 1), ("worker-2", 1))]
    commit(there, 0, 2)
    assert applied(commit(there, 1, 2)) == [(("worker-0", 2), ("worker-1", 2), ("worker-3", 2))]


def test_one_server_that_is_left_closes_no_round_before_it_has_the_last_one() -> None:
    """Of its slices some have it, others came from the server that is gone, without it."""
    here = rounds_of(3, spare=2, decides=True)
    here.learn(RoundMembership(0, 1, [("worker-0", 10, 1)], [("worker-1", 11, 1)]))
    here.is_alone = True
    clocks = {("worker-1", 11): 1}
    here.reset([Standing(f"worker-{k}", 10 + k, clock=1) for k in range(3)], clocks)
    waits = commit(here, 1, 2)
    assert applied(waits) == [] and waits.reason == "the round waits for worker-0"
    assert applied(commit(here, 0, 1)) == [(("worker-0", 1),), (("worker-1", 2),)]


def test_a_rest_from_before_a_round_is_no_sign_that_it_is_everywhere() -> None:
    round_membership = RoundMembership(0, 1, [("worker-0", 10, 2)])
    last_inactive = {"worker-0": Standing("worker-0", 10, clock=1, inactive=True)}
    assert unanswered(round_membership, last_inactive) == ["worker-0"]
    last_inactive["worker-0"].clock = 2
    assert unanswered(round_membership, last_inactive) == []


def test_who_rests_since_a_round_that_is_lost_with_a_slice_is_not_waited_for() -> None:
    """It was answered, so it does not make it again; its clock is set back to what the worker's copy has."""
    here = rounds_of(3, decides=True)
    for worker in (0, 1):
        commit(here, worker, 1)
    here.rest("worker-0", 10, 0)
    here.reset(list(here.standings.values()), {})
    assert here.standings["worker-0"].clock == 0
    assert unanswered(here.round_memberships.newest, here.standings) == []
    assert applied(commit(here, 1, 1)) == [(("worker-1", 1),)]


def test_who_stands_where_the_one_that_is_gone_has_put_it() -> None:
    """All slices here have its commit, by way of the backup; the server itself was never told of it."""
    here, there = rounds_of(3, decides=True), rounds_of(3)
    for clock in (1, 2, 3):
        for worker in (0, 1):
            commit(here, worker, clock)
    commit(here, 2, 1)
    round_membership = told(here, 2, 1)
    there.learn(round_membership)
    there.reset(list(there.standings.values()), {("worker-2", 12): 1, ("worker-0", 10): 3, ("worker-1", 11): 3})
    standing = there.standings["worker-2"]
    assert standing.turn() == (0, 3) and standing.late == 1
    assert commit(there, 2, 1).kind == "late"
    last_inactive = Standing("worker-2", 12, clock=1, phase=4, phase_began=1, inactive=True)
    there.reset([last_inactive], {("worker-2", 12): 1})
    assert last_inactive.turn() == (4, 0) and last_inactive.inactive, "it has rested since"


# -- all of them ---------------------------------------------------------------------------------------------


class Told(NamedTuple):
    """On its way from a worker to a server."""

    what: str
    clock: int
    phase: int
    round_membership: RoundMembership | None


class Job:
    """Workers and servers with a network between them that keeps the order of each pair, and no other order."""

    def __init__(self, scripts: list[list[int]], num_servers: int, spare: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.servers = [rounds_of(len(scripts), spare, decides=k == 0) for k in range(num_servers)]
        self.log: list[list[Members]] = [[] for _ in self.servers]
        self.late: list[set[tuple[str, int]]] = [set() for _ in self.servers]
        self.todo = [self._life(script) for script in scripts]
        self.clocks, self.phases = [0] * len(scripts), [0] * len(scripts)
        self.network: dict[tuple[int, int], list[Told]] = {
            (worker, server): [] for worker in range(len(scripts)) for server in range(num_servers)
        }
        self.unanswered: dict[int, set[int]] = {}

    @staticmethod
    def _life(script: list[int]) -> list[str]:
        return [word for count in script for word in ["commit"] * count + ["rest"]] + ["leave"]

    def run(self) -> None:
        while True:
            able = [w for w, todo in enumerate(self.todo) if todo and not self._waits(w)]
            steps = [(w, None) for w in able] + [way for way, sent in self.network.items() if sent]
            if not steps:
                break
            worker, server = self.chance.choice(steps)
            if server is None:
                self._act(worker)
            else:
                self._hear(worker, server)
        stuck = [w for w, todo in enumerate(self.todo) if todo or self._waits(w)]
        assert not stuck, [rounds.waiting_reason() for rounds in self.servers]

    def _waits(self, worker: int) -> bool:
        return bool(self.unanswered.get(worker)) or any(self.network[worker, s] for s in range(len(self.servers)))

    def _act(self, worker: int) -> None:
        what = self.todo[worker].pop(0)
        if what == "commit":
            self.clocks[worker] += 1
            self.unanswered[worker] = set(range(len(self.servers)))
            self._say(worker, [0], what, None)
            return
        self._say(worker, range(len(self.servers)), what, None)
        self.phases[worker] += what == "rest"

    def _say(
        self, worker: int, servers: list[int] | range, what: str, round_membership: RoundMembership | None
    ) -> None:
        for server in servers:
            self.network[worker, server].append(
                Told(what, self.clocks[worker], self.phases[worker], round_membership)
            )

    def _hear(self, worker: int, server: int) -> None:
        told_, rounds = self.network[worker, server].pop(0), self.servers[server]
        name = (f"worker-{worker}", 10 + worker)
        if told_.what == "rest":
            self._take(server, rounds.rest(*name, told_.phase))
        elif told_.what == "leave":
            self._take(server, rounds.leave(*name))
        else:
            if told_.round_membership is not None:
                rounds.learn(told_.round_membership)
            self._take(server, commit(rounds, worker, told_.clock, told_.phase))

    def _take(self, server: int, verdict: Verdict[str]) -> None:
        for members in applied(verdict):
            if verdict.kind == "late":
                self.late[server].update(members)
            else:
                self.log[server].append(members)
            for name, clock in members:
                worker = int(name.rpartition("-")[2])
                self.unanswered[worker].discard(server)
                if server == 0:
                    round_membership = self.servers[0].membership_to_tell(name, 10 + worker, clock)
                    self._say(worker, range(1, len(self.servers)), "commit", round_membership)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=2, max_size=5),
    st.integers(2, 3),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_all_servers_have_the_same_rounds_in_the_same_order(
    scripts: list[list[int]], num_servers: int, spare: int, seed: int
) -> None:
    """And the same are late; every commit is in one round or late, on all of them; and nobody is stuck."""
    job = Job(scripts, num_servers, spare, seed)
    job.run()
    assert all(log == job.log[0] for log in job.log) and all(late == job.late[0] for late in job.late)
    counted = [entry for members in job.log[0] for entry in members]
    assert len(counted) == len(set(counted)) and not job.late[0].intersection(counted)
    assert len(counted) + len(job.late[0]) == sum(map(sum, scripts))
    turns = [{s.name: s.turn() for s in rounds.standings.values()} for rounds in job.servers]
    assert all(each == turns[0] for each in turns), "whichever of them decides next, all stand where they stood"
