"""The lease queue: what it answers and to whom; and that no late word, and no death, makes anything count twice."""

from __future__ import annotations

import msgspec

from syncline.config import JobConfig
from syncline.core.leasing.loader import Loader
from syncline.core.leasing.queue import LeaseQueue
from syncline.core.membership import JobState, Membership
from syncline.core.slice_state import Identity
from syncline.core.wire.leases import AskLease, GivenLease, OpenEpoch

DATA = Loader(32, 4)
ONE, TWO = ("worker-0", 1), ("worker-1", 2)


def membership(policy: str = "async") -> Membership:
    members = Membership(JobState(config=JobConfig(workers=2, servers=1, policy=policy)))
    for role, name in (("worker", "worker-0"), ("worker", "worker-1"), ("server", "server-0")):
        members.join(role, name, "here", None)
    members.form()
    return members


def lease_queue(policy: str = "async") -> LeaseQueue[str]:
    made: LeaseQueue[str] = LeaseQueue(membership(policy))
    for owner in (ONE, TWO):
        made.leasing.open(owner, "a", 0, DATA, 2)
    return made


def ask(at: LeaseQueue[str], owner: Identity, request: str = "", **more: object) -> dict[str, GivenLease]:
    at.ask(owner, msgspec.structs.replace(AskLease("a", 0, []), **more), request, 0.0)
    return {asked.request: given for asked, given in at.answers()[0]}


def take_all(at: LeaseQueue[str], owner: Identity) -> list[GivenLease]:
    found: list[GivenLease] = []
    while True:
        given = ask(at, owner, "now", left=1, newest=found[-1].lease if found else 0)["now"]
        if not given.lease:
            return found
        found.append(given)


def test_a_chief_whose_script_has_ended_is_not_waited_for() -> None:
    """It stays a member until the last save is made, and opens no loader any more."""
    members = membership()
    here: LeaseQueue[str] = LeaseQueue(members)
    assert here.seed("worker-1", OpenEpoch("a", 0, DATA, 5)) is None
    members.finishing.add("worker-0")
    assert here.seed("worker-1", OpenEpoch("a", 0, DATA, 5)) == 5


def test_the_question_of_a_new_life_stays_when_the_leases_of_the_old_one_go_back() -> None:
    here = lease_queue()
    take_all(here, ONE)
    again = ("worker-0", 9)
    assert not ask(here, again, "again", waits=True)
    here.out({ONE: True}, ())
    assert "again" in {asked.request for asked, _ in here.answers()[0]}


def test_leases_of_the_dead_stay_while_a_commit_of_theirs_waits_for_its_round() -> None:
    """It may still be applied; or it is dropped when primaries change: only then is it known what is to do again."""
    here = lease_queue("sync")
    leases = take_all(here, ONE)
    here.out({ONE: True}, [ONE])
    epoch = here.leasing.epoch("a", 0)
    assert epoch is not None and len(epoch.of(ONE)) == len(leases)
    here.out({ONE: True}, ())
    assert not epoch.of(ONE)


def test_what_was_given_back_is_given_back_also_to_the_next_coordinator() -> None:
    """A coordinator dies before it has kept what a worker gave back, and the worker reads none of it any more."""
    members = membership()
    before: LeaseQueue[str] = LeaseQueue(members)
    for owner in (ONE, TWO):
        before.leasing.open(owner, "a", 0, DATA, 2)
    leases = take_all(before, ONE)
    kept = msgspec.msgpack.encode(members.state)
    given = [(one.lease, 0) for one in leases]
    before.leasing.gave_back(ONE, "a", 0, given)
    after: LeaseQueue[str] = LeaseQueue(Membership(msgspec.msgpack.decode(kept, type=JobState)))
    answer = ask(after, ONE, "more", newest=leases[-1].lease, given=given)["more"]
    assert answer.lease and answer.lease not in {one.lease for one in leases}


def test_who_could_not_be_asked_to_give_back_is_asked_again() -> None:
    """The question, or its answer, was lost with a connection: nobody may wait for it for ever."""
    here = lease_queue()
    take_all(here, ONE)
    here.ask(TWO, AskLease("a", 0, [], waits=True), "two", 0.0)
    assert [owner for owner, _ in here.answers()[1]] == [ONE]
    assert not here.answers()[1], "it is asked once"
    here.leasing.not_recalled(ONE, "a", 0)
    assert [owner for owner, _ in here.answers()[1]] == [ONE]


def test_workers_are_to_say_what_they_used_until_each_has_said_it() -> None:
    """Slice 0 came back from a copy. A coordinator that dies meanwhile leaves that to the next."""
    members = membership()
    here: LeaseQueue[str] = LeaseQueue(members)
    here.leasing.open(ONE, "a", 0, DATA, 2)
    (one, *_) = take_all(here, ONE)
    here.acks_are_lost()
    assert here.unheard() == [ONE, TWO]
    here.heard(ONE, [(one.lease, 0, 2)], [], is_all=False)
    epoch = here.leasing.epoch("a", 0)
    assert here.unheard() == [ONE, TWO] and epoch is not None and epoch.num_done == 2, "commits of it are under way"
    here.heard(ONE, [(one.lease, 0, 4)], [], is_all=True)
    assert here.unheard() == [TWO] and epoch.num_done == 4
    after: LeaseQueue[str] = LeaseQueue(
        Membership(msgspec.msgpack.decode(msgspec.msgpack.encode(members.state), type=JobState))
    )
    assert after.unheard() == [TWO]
    members.evict("worker-1", "is dead")
    assert not here.unheard()
