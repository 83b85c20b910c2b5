"""Scripts that are not at the same place cannot meet: all get the same error, and go on together after a restart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.collectives.conftest import over_unix_sockets
from tests.collectives.test_membership import later, wait_until
from tests.collectives.together import messages, together
from tests.patience import PATIENCE

from syncline import collectives
from syncline.errors import CollectiveError
from syncline.testing import local_job
from syncline.testing.local import LocalJob
from syncline.worker.collectives import verbs
from syncline.worker.job import Job

F3, LARGE = np.ones(3, np.float32), np.ones(50_000, np.float32)
REMEDY = (
    "; their scripts are not at the same place, so this call fails at all of them. Catch the error in every worker "
    "and call syncline.collectives.restart() (docs/guides/collectives.md, 'When a worker starts again')"
)
#: Those that live after worker-1 has started again.
LIVING = [0, 2, 3]


@pytest.fixture(params=["auto", "tcp", "unix"])
def fresh(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[LocalJob]:
    """In one process, over TCP, and over Unix sockets, where small calls become habits."""
    settings: dict[str, Any] = {"wait_seconds": PATIENCE, "most_workers": 4}
    if request.param == "unix":
        with over_unix_sockets(3, str(tmp_path), **settings) as job:
            together(job, lambda me: collectives.restart())
            yield job
        vars(job).clear()  # pytest holds it for longer, and it the memory that its workers mapped
    else:
        with local_job(workers=3, folder=str(tmp_path), transport=request.param, **settings) as job:
            yield job


def start_again(job: LocalJob, name: str) -> None:
    """This worker dies between two calls, and its next life joins; it is `job[3]`."""
    job.kill(name)
    wait_until(lambda: all(one.world_size == 2 for one in job.jobs if one.name != name))
    job.add_worker(name)
    wait_until(lambda: all(one.world_size == 3 for one in job.jobs[:3] if one.name != name))


@pytest.mark.parametrize("x", [F3, LARGE], ids=["small", "large"])
def test_a_new_life_cannot_meet_calls_in_the_middle(fresh: LocalJob, x: Any) -> None:
    """The same verb, shape and op: only the place in the script differs. However often they try, all get the same
    error; then they restart from the state of those who have one, and go on."""
    together(fresh, lambda me: [collectives.all_reduce(x) for _ in range(5)])
    start_again(fresh, "worker-1")
    for turn in range(3):
        results = together(fresh, lambda me: collectives.all_reduce(x), ranks=LIVING)
        told = f"worker-1 began its script after worker-0 and worker-2 had made {5 + turn} collective calls{REMEDY}"
        assert messages(results) == [f"CollectiveError: {told}"] * 3

    def work(me: Job) -> Any:
        state = [np.full(3, 10.0 + me.rank), torch.full((30_000,), me.rank)]
        step = collectives.restart(0 if me.name == "worker-1" else 5, state)
        return step, state[0][0], float(state[1][-1]), float(collectives.all_reduce(x)[0])

    assert together(fresh, work, ranks=LIVING) == [(5, 10.0, 0.0, 3.0)] * 3


def test_nor_in_a_new_group_nor_from_one_to_one(fresh: LocalJob) -> None:
    together(fresh, lambda me: [collectives.all_reduce(F3) for _ in range(5)])
    start_again(fresh, "worker-1")
    assert fresh[3].rank == 2

    def among_two(me: Job) -> Any:
        return collectives.all_reduce(F3, group=collectives.group([0, 2]))

    def to_new(me: Job) -> Any:
        return collectives.send(F3, to=2) if me.rank == 0 else collectives.recv(0)

    def from_new(me: Job) -> Any:
        return collectives.send(F3, to=0) if me.rank == 2 else collectives.recv(2)

    told = f"worker-1 began its script after worker-0 had made 5 collective calls{REMEDY}"
    assert messages(together(fresh, among_two, ranks=[0, 3])) == [f"CollectiveError: {told}"] * 2
    told = f"worker-1 began its script, or restarted, after worker-0 had made collective calls{REMEDY}"
    for work in (to_new, from_new):
        assert messages(together(fresh, work, ranks=[0, 3])) == [f"CollectiveError: {told}"] * 2
    together(fresh, lambda me: collectives.restart(), ranks=LIVING)
    assert all((found == 2).all() for found in together(fresh, among_two, ranks=[0, 3]))
    assert together(fresh, to_new, ranks=[0, 3])[1].tolist() == [1, 1, 1]
    assert together(fresh, from_new, ranks=[0, 3])[0].tolist() == [1, 1, 1]


def test_a_call_that_failed_at_one_rank_only(fresh: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others completed it: one that repeats it, or leaves it out, is not where they are. The calls after it
    cannot meet, in the world or in a group of both; those of the others can."""
    together(fresh, lambda me: [collectives.all_reduce(F3) for _ in range(3)])
    others_are_through = threading.Barrier(3)

    exchange = verbs.exchange

    def fails(rendezvous: Any, *given: Any) -> Any:
        if rendezvous is not fresh[2].collectives.calls.rendezvous:
            return exchange(rendezvous, *given)
        others_are_through.wait(PATIENCE)
        raise MemoryError("7 bytes")

    def work(me: Job) -> Any:
        if me.rank == 2:
            return collectives.all_reduce(F3, "product")
        found = collectives.all_reduce(F3, "product")
        others_are_through.wait(PATIENCE)
        return found.tolist()

    with monkeypatch.context() as patch:
        patch.setattr(verbs, "exchange", fails)
        *others, failed = together(fresh, work)
    assert others == [[1, 1, 1]] * 2 and isinstance(failed, MemoryError)
    for turn in range(2):
        told = (
            f"CollectiveError: of the calls that worker-0 and worker-2 made together, {turn} failed at worker-0 and "
            f"{turn + 1} at worker-2{REMEDY}"
        )
        assert messages(together(fresh, lambda me: collectives.all_reduce(F3))) == [told] * 3

    def among(*ranks: int) -> list[Any]:
        return together(
            fresh, lambda me: collectives.all_reduce(1, group=collectives.group(ranks)), ranks=list(ranks)
        )

    assert among(0, 1) == [2, 2] and len(messages(among(0, 2))) == len(messages(among(1, 2))) == 2
    assert together(fresh, lambda me: (collectives.restart(me.rank), collectives.all_reduce(1))) == [(2, 3)] * 3
    assert among(0, 2) == among(1, 2) == [2, 2]


def test_a_failure_that_all_have_seen_leaves_all_level(fresh: LocalJob) -> None:
    """A death in a call: those who are left go on without a restart."""
    together(fresh, lambda me: collectives.all_reduce(F3))
    thread = later(lambda: fresh.kill("worker-1"), [fresh[0], fresh[2]])
    assert len(messages(together(fresh, lambda me: collectives.all_reduce(F3), ranks=[0, 2]))) == 2
    thread.join()
    wait_until(lambda: fresh[0].world_size == fresh[2].world_size == 2)
    assert together(fresh, lambda me: [collectives.all_reduce(1) for _ in range(3)], ranks=[0, 2]) == [[2, 2, 2]] * 2


def test_restart_waits_for_those_who_call_something_else(fresh: LocalJob) -> None:
    """Their calls fail until they restart too; those that are in `restart` already stay there."""
    together(fresh, lambda me: collectives.all_reduce(F3))

    def work(me: Job) -> Any:
        for _ in range(me.rank):
            with pytest.raises(CollectiveError, match=r"worker-0 (and worker-1 )?called restart"):
                collectives.all_reduce(F3)
        return collectives.restart(7 - me.rank), collectives.all_reduce(1)

    assert together(fresh, work) == [(7, 3)] * 3


def test_a_death_while_others_restart(fresh: LocalJob) -> None:
    """They restart without it: its death leaves nothing half done."""
    together(fresh, lambda me: collectives.all_reduce(F3))
    thread = later(lambda: fresh.kill("worker-0"), [fresh[1], fresh[2]])

    def work(me: Job) -> Any:
        state = np.full(3, int(me.name[-1]))
        return collectives.restart(1, [state]), state.tolist(), collectives.all_reduce(1)

    assert together(fresh, work, ranks=[1, 2]) == [(1, [1, 1, 1], 2)] * 2
    thread.join()


def test_a_restart_that_one_rank_did_not_finish(fresh: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the next attempt; it comes along when all restart once more."""
    monkeypatch.setattr(fresh[2].collectives.calls.rendezvous.heard, "restart", _interrupted)
    *others, interrupted = together(fresh, lambda me: collectives.restart(5))
    assert others == [5, 5] and isinstance(interrupted, RuntimeError)
    monkeypatch.undo()
    told = messages(together(fresh, lambda me: collectives.all_reduce(F3)))
    assert len(set(told)) == 1 and told[0].startswith("CollectiveError: the workers have not restarted equally often")
    assert together(fresh, lambda me: (collectives.restart(me.rank), collectives.all_reduce(1))) == [(2, 3)] * 3


def _interrupted(*arguments: Any) -> None:
    raise RuntimeError("stop")


def test_states_of_different_shapes(fresh: LocalJob) -> None:
    """All get the same error, and keep what they have."""

    def work(me: Job) -> Any:
        state = [np.full(3, me.rank), np.full(4 + me.rank, me.rank)]
        with pytest.raises(CollectiveError) as caught:
            collectives.restart(me.rank, state)
        assert all((one == me.rank).all() for one in state)
        return str(caught.value)

    told = "worker-0 called broadcast into int64[4], and gets int64[6] from worker-2"
    assert together(fresh, work) == [told] * 3
    assert together(fresh, lambda me: collectives.restart(me.rank)) == [2, 2, 2]


def test_what_was_sent_before_a_restart_is_refused(fresh: LocalJob) -> None:
    """The receiver gets what was sent after it."""
    together(fresh, lambda me: collectives.barrier())
    (ticket,) = together(fresh, lambda me: collectives.send(1, to=1, wait=False), ranks=[0])
    heard = fresh[1].collectives.calls.rendezvous.heard

    def has_come() -> bool:
        for link, _ in heard.known():
            if link.waiter_reads:
                link.read(0.0)
        return any(stream.offers for _, stream in heard.known())

    wait_until(has_come)
    together(fresh, lambda me: collectives.restart())

    def work(me: Job) -> Any:
        if me.rank == 1:
            return int(collectives.recv(0))
        with pytest.raises(CollectiveError, match="worker-1 has restarted since worker-0 called send"):
            ticket.wait(PATIENCE)
        return collectives.send(2, to=1)

    assert together(fresh, work, ranks=[0, 1]) == [None, 2]


def test_one_who_joins_before_the_first_call_meets_all(tmp_path: Any) -> None:
    with local_job(workers=2, folder=str(tmp_path), wait_seconds=PATIENCE, most_workers=4) as job:
        job.add_worker("worker-2")
        wait_until(lambda: all(one.world_size == 3 for one in job.jobs))
        assert together(job, lambda me: collectives.all_reduce(1)) == [3, 3, 3]


def test_one_who_works_alone_is_in_the_middle_too(tmp_path: Any) -> None:
    with local_job(workers=1, folder=str(tmp_path), wait_seconds=PATIENCE, most_workers=4) as job:
        assert together(job, lambda me: [collectives.all_reduce(1) for _ in range(4)]) == [[1] * 4]
        job.add_worker("worker-1")
        wait_until(lambda: job[0].world_size == 2)
        told = f"CollectiveError: worker-1 began its script after worker-0 had made 4 collective calls{REMEDY}"
        assert messages(together(job, lambda me: collectives.all_reduce(1))) == [told] * 2
        assert together(job, lambda me: (collectives.restart(me.rank), collectives.all_reduce(1))) == [(1, 2)] * 2
