"""The coordinator hands out samples: what is kept before it is told, whose word counts, what the dead leave."""

from __future__ import annotations

from typing import Any

import pytest
from tests.coordinator.played import SECONDS, Job, jobs, until

from syncline.core.leasing.loader import Loader
from syncline.core.slice_state import Copy
from syncline.core.wire.control import Heartbeat, Install, Leave, Over, Rejoin
from syncline.core.wire.leases import (
    AskLease,
    AskLeaseAcks,
    Confirm,
    GivenLease,
    LeaveEpoch,
    Opened,
    OpenEpoch,
    Recall,
)
from syncline.core.wire.message import Message
from syncline.errors import ConfigError
from syncline.net.rpc import Call, Request

__all__ = ["jobs"]
DATA = Loader(64, 4)


def begin(jobs: Any, policy: str = "async", data: Loader = DATA, **settings: Any) -> Job:
    job: Job = jobs(policy=policy, **settings).begin()
    job.register()
    for name in ("worker-0", "worker-1"):
        assert job[name].ask(OpenEpoch("a", 0, data)) == Opened(True)
    return job


def ask(job: Job, name: str, *, left: int = 0, waits: bool = False, held: Any = ()) -> Call:
    return job[name].endpoint.call(AskLease("a", 0, list(held), left, waits=waits))


def lease(job: Job, name: str) -> GivenLease:
    answer = ask(job, name).wait(SECONDS)
    assert isinstance(answer, GivenLease) and answer.lease
    return answer


def primary(job: Job) -> Any:
    return job[job.replica_sets()[0][0]]


def used(job: Job, *leases: GivenLease) -> None:
    """The server of slice 0 says with its beat that all of these was used."""
    primary(job).ask(Heartbeat(acks=[(one.lease, 0, len(one.span)) for one in leases]))


def take_all(job: Job, name: str) -> list[GivenLease]:
    found = []
    while True:
        answer = ask(job, name, left=1).wait(SECONDS)
        assert isinstance(answer, GivenLease)
        if not answer.lease:
            return found
        found.append(answer)


def test_a_lease_is_kept_before_it_is_told(jobs: Any) -> None:
    job = begin(jobs)
    job.disk.full = True
    asked = ask(job, "worker-0")
    assert not asked.arrives(0.3)
    job.disk.full = False
    answer = asked.wait(SECONDS)
    assert isinstance(answer, GivenLease)
    assert answer.lease in job.disk.last.leases.epochs["a"][0].leases


def test_an_epoch_is_kept_before_anybody_hears_that_it_has_begun(jobs: Any) -> None:
    """A coordinator that comes back and knows nothing of it would take it for finished."""
    job = begin(jobs)
    assert job.disk.last.leases.epochs["a"][0].num_todo == 64


def test_the_epoch_is_finished_by_the_servers_word_and_stays_so(jobs: Any) -> None:
    job = begin(jobs)
    leases = take_all(job, "worker-0")
    assert sum(len(one.span) for one in leases) == 64
    waiting = ask(job, "worker-1", waits=True)
    assert not waiting.arrives(0.2)
    used(job, *leases)
    assert waiting.wait(SECONDS).is_finished
    until(lambda: bool(primary(job).all(Confirm)), "the server may forget it, once it is kept")
    assert job.disk.last.leases.finished == {"a": [(0, 1)]} and not job.disk.last.leases.epochs["a"]
    assert not job["worker-1"].ask(OpenEpoch("a", 0, DATA)).is_left
    again = jobs(disk=job.disk)
    assert not again.coordinator.leases.leasing.open(("worker-0", 9), "a", 0, DATA, 2)


def test_what_a_backup_was_not_told_is_confirmed_to_it_when_it_is_promoted(jobs: Any) -> None:
    """A word that nobody answers may get lost: the backup still has what was confirmed long ago, and says so."""
    job = begin(jobs, replicas=2)
    one = lease(job, "worker-0")
    acks = [(one.lease, 0, len(one.span))]
    used(job, one)
    until(lambda: bool(primary(job).all(Confirm)), "it is kept")
    name, backup = job.replica_sets()[0]
    job.kill(name)
    until(lambda: job.replica_sets()[0][0] == backup, "the backup is promoted")
    before = len(job[backup].all(Confirm))
    num_done = job.coordinator.membership.state.leases.epochs["a"][0].num_done
    job[backup].ask(Heartbeat(acks=acks))
    until(lambda: len(job[backup].all(Confirm)) > before, "it may forget that now")
    assert job[backup].all(Confirm)[-1].acks == acks
    assert job.coordinator.membership.state.leases.epochs["a"][0].num_done == num_done == len(one.span)


def test_what_is_not_kept_is_not_confirmed(jobs: Any) -> None:
    job = begin(jobs)
    one = lease(job, "worker-0")
    job.disk.full = True
    used(job, one)
    until(lambda: any("full" in line for line in job.log), "it is tried")
    assert not primary(job).all(Confirm)
    job.disk.full = False
    until(lambda: bool(primary(job).all(Confirm)), "as soon as there is space")
    assert primary(job).all(Confirm)[-1].acks == [(one.lease, 0, len(one.span))]


def test_the_dead_ones_leases_go_back_after_the_server_has_said_what_counts(jobs: Any) -> None:
    job = begin(jobs)
    leases = take_all(job, "worker-0")
    first = leases[0]
    server = primary(job)
    server.holds.add(AskLeaseAcks)
    waiting = ask(job, "worker-1", waits=True)
    job.kill("worker-0")
    until(lambda: bool(server.all(Install)), "it is fenced")
    asked = len(server.held)
    until(lambda: len(server.held) > asked, "the server is asked after that")
    assert not waiting.arrives(0.1)
    server.acks = [(first.lease, 0, 4)]
    server.holds.clear()
    for request in server.held:
        server.handle(request)
    taken = [waiting.wait(SECONDS), *take_all(job, "worker-1")]
    read = sorted(p for one in taken for p in one.span.positions().tolist())
    assert read == sorted(set(range(64)) - set(first.span.positions(0, 4).tolist()))


def come_back(job: Job, name: str) -> Any:
    """The worker's connection breaks and it makes another. The old one, as the coordinator has it."""
    before = job.coordinator.job.endpoints[name]
    job[name].connect()
    job[name].ask(Rejoin(name, job[name].incarnation))
    return before


def comes_late(job: Job, connection: Any, message: Message) -> None:
    """It was read from this connection before that ended, by a thread that stood still since."""
    job.coordinator.handle(Request(connection, 99, message, (), None))


def test_a_question_of_a_connection_before_is_none(jobs: Any) -> None:
    """Answered, it would take away what the worker was given since."""
    job = begin(jobs)
    before = come_back(job, "worker-0")
    both = [lease(job, "worker-0").lease, lease(job, "worker-0").lease]
    comes_late(job, before, AskLease("a", 0, [], newest=0))
    epoch = job.coordinator.membership.state.leases.epochs["a"][0]
    assert list(epoch.leases) == both and all(one.is_told for one in epoch.leases.values())


def test_a_question_that_comes_when_its_loop_was_left_is_none(jobs: Any) -> None:
    """The lease would be of nobody who reads: the worker has forgotten the question with its loop."""
    job = begin(jobs)
    before = come_back(job, "worker-0")
    job["worker-0"].ask(LeaveEpoch("a", 0, [], [], 0))
    comes_late(job, before, AskLease("a", 0, [], newest=0))
    assert sum(len(one.span) for one in take_all(job, "worker-1")) == 64


def test_a_loop_that_is_open_again_is_not_left_by_a_word_of_before(jobs: Any) -> None:
    """Said twice, since the connection broke, it would give to others what the worker reads since."""
    job = begin(jobs)
    before = come_back(job, "worker-0")
    job["worker-0"].ask(LeaveEpoch("a", 0, [], [], 0))
    job["worker-0"].ask(OpenEpoch("a", 0, DATA))
    first = lease(job, "worker-0")
    comes_late(job, before, LeaveEpoch("a", 0, [], [], 0))
    assert first.lease in job.coordinator.membership.state.leases.epochs["a"][0].leases


def test_who_waits_is_answered_where_it_asked_last(jobs: Any) -> None:
    job = begin(jobs)
    leases = take_all(job, "worker-0")
    before = come_back(job, "worker-1")
    waiting = ask(job, "worker-1", waits=True)
    comes_late(job, before, AskLease("a", 0, [], waits=True))
    used(job, *leases)
    assert waiting.wait(SECONDS).is_finished


def test_one_that_left_in_order_leaves_its_leases_too_and_nothing_is_suspected(jobs: Any) -> None:
    job = begin(jobs)
    take_all(job, "worker-0")
    job["worker-0"].ask(Leave())
    waiting = ask(job, "worker-1")
    assert waiting.wait(SECONDS).lease
    assert not job.coordinator.membership.state.leases.epochs["a"][0].suspect_batches


def test_whoever_has_nothing_to_do_gets_what_others_have_not_begun(jobs: Any) -> None:
    job = begin(jobs)
    leases = take_all(job, "worker-0")
    job["worker-0"].gives_back = [(one.lease, 0) for one in leases[1:]]
    answer = ask(job, "worker-1").wait(SECONDS)
    assert answer.lease and job["worker-0"].all(Recall) == [Recall("a", 0)]
    assert answer.span.start in leases[1].span.positions().tolist()


def test_who_still_has_work_does_not_take_it_from_others(jobs: Any) -> None:
    job = begin(jobs)
    take_all(job, "worker-0")
    answer = ask(job, "worker-1", left=4).wait(SECONDS)
    assert not answer.lease and not answer.is_finished and not job["worker-0"].all(Recall)


def test_who_left_the_loop_is_dealt_nothing_more(jobs: Any) -> None:
    job = begin(jobs, "sync")
    one, two = lease(job, "worker-0"), lease(job, "worker-1")
    job["worker-0"].ask(LeaveEpoch("a", 0, [(one.lease, 4)], [(one.lease, 0, 4)]))
    used(job, two)
    rest = take_all(job, "worker-1")
    assert sum(len(answer.span) for answer in rest) == 64 - 4 - len(two.span)
    used(job, *rest)
    assert ask(job, "worker-1").wait(SECONDS).is_finished
    until(lambda: any("4 samples were read and used in no step" in line for line in job.log), "it is said")


def test_what_was_dealt_to_one_that_does_not_read_goes_to_who_waits(
    jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncline.coordinator.leases.RECLAIM_SECONDS", 0.2)
    job: Job = jobs(policy="sync").begin()
    job.register()
    job["worker-0"].ask(OpenEpoch("a", 0, DATA))
    leases = take_all(job, "worker-0")
    used(job, *leases)
    answer = ask(job, "worker-0", waits=True).wait(SECONDS)
    assert answer.lease and any("do not read it" in line for line in job.log)


def test_the_chiefs_seed_counts_and_is_kept_before_it_is_told(jobs: Any) -> None:
    """Also when another worker opens the loader first: nothing is opened for it until the chief has."""
    job: Job = jobs(policy="async").begin()
    job.register()
    assert job["worker-1"].ask(OpenEpoch("a", 0, DATA, 5)) == Opened(False, is_early=True)
    assert job.coordinator.leases.leasing.epoch("a", 0) is None
    assert job["worker-0"].ask(OpenEpoch("a", 0, DATA, -1)) == Opened(True, seed=(1 << 64) - 1)
    assert job.disk.last.leases.seeds == {"a": (1 << 64) - 1}
    assert job["worker-1"].ask(OpenEpoch("a", 0, DATA, 5)) == Opened(True, seed=(1 << 64) - 1)
    assert job["worker-0"].ask(OpenEpoch("a", 1, DATA, 9)).seed == (1 << 64) - 1, "one seed for all epochs"
    assert job["worker-1"].ask(OpenEpoch("b", 0, DATA, 6, insists=True)).seed == 6, "the chief does not come"
    assert job["worker-0"].ask(OpenEpoch("b", 0, DATA, 7)).seed == 6
    assert job["worker-1"].ask(OpenEpoch("c", 0, DATA)).seed is None, "no seed, no wait"


def test_when_the_chief_has_finished_the_next_workers_seed_counts(jobs: Any) -> None:
    job: Job = jobs(policy="async").begin()
    job.register()
    job["worker-0"].ask(Leave())
    assert job["worker-1"].ask(OpenEpoch("a", 0, DATA, 5)).seed == 5


def test_loaders_of_different_length_are_refused(jobs: Any) -> None:
    job = begin(jobs)
    with pytest.raises(ConfigError, match="worker-1 has 65 samples in batches of 4 in 'a', worker-0 has 64"):
        job["worker-1"].ask(OpenEpoch("a", 1, Loader(65, 4)))
    until(lambda: bool(job["worker-0"].all(Over)), "starting it again would not help: the job is over")
    (over,) = job["worker-0"].all(Over)
    assert over.failed and over.culprit == "worker-1" and "worker-1 has 65 samples" in over.reason


def test_with_one_replica_the_living_say_what_the_lost_server_knew(jobs: Any) -> None:
    job = begin(jobs, slice_bytes=1 << 20)
    one = lease(job, "worker-0")
    job["worker-0"].acks = [(one.lease, 0, len(one.span))]
    job["worker-0"].copies = [Copy(0, 3, {}, 3)]
    job.kill(primary(job).name)
    until(lambda: bool(job["worker-0"].all(AskLeaseAcks)), "it is asked")
    until(lambda: job.coordinator.leases.leasing.epoch("a", 0).num_done == len(one.span), "and believed")  # type: ignore[union-attr]
    assert any("count as read" in line for line in job.log)


def test_of_job_steps_it_is_said_that_steps_pushed_nothing(jobs: Any) -> None:
    job = begin(jobs, data=Loader(8, 1, is_steps=True))
    found = take_all(job, "worker-0")
    first = found[0]
    job["worker-0"].ask(LeaveEpoch("a", 0, [(one.lease, len(one.span)) for one in found], [(first.lease, 0, 1)]))
    for one in found:
        primary(job).ask(Heartbeat(acks=[(one.lease, 1 if one is first else 0, len(one.span))]))
    assert ask(job, "worker-0").wait(SECONDS).is_finished
    until(lambda: any("job.steps: 1 step pushed nothing" in line for line in job.log), "it is said")
    assert not any("samples" in line for line in job.log)
