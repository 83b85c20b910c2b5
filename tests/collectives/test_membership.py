"""Workers that die, leave and come while others are in a collective: nobody hangs, errors name who is gone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.collectives.together import messages, together, waits
from tests.patience import PATIENCE

from syncline import collectives
from syncline.errors import CollectiveError, SynclineError, WaitTimeout
from syncline.testing import local_job
from syncline.testing.local import LocalJob
from syncline.worker.collectives.rendezvous import JointCall, Rendezvous

LARGE = np.ones(200_000, np.float32)


@pytest.fixture(params=["auto", "tcp"])
def fresh(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[LocalJob]:
    settings = {"transport": request.param, "wait_seconds": PATIENCE, "most_workers": 4}
    with local_job(workers=3, folder=str(tmp_path), **settings) as job:
        yield job


def later(action: Any, waiting: Any = ()) -> threading.Thread:
    """As soon as these workers wait in their calls."""

    def run() -> None:
        wait_until(lambda: all(waits(job) for job in waiting))
        action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_death_while_others_wait(fresh: LocalJob) -> None:
    """Both get an error that names it; then the world is those who are left."""
    assert together(fresh, lambda me: collectives.all_reduce(1)) == [3, 3, 3]
    thread = later(lambda: fresh.kill("worker-1"), [fresh[0], fresh[2]])
    results = together(fresh, lambda me: collectives.all_reduce(LARGE), ranks=[0, 2])
    thread.join()
    for told in messages(results):
        assert told.startswith("CollectiveError: worker-1 is gone while all_reduce of float32[200000] was under way")
    wait_until(lambda: fresh[0].world_size == fresh[2].world_size == 2)
    assert together(fresh, lambda me: collectives.all_reduce(1), ranks=[0, 2]) == [2, 2]


def test_what_one_that_is_out_may_still_write_into_is_not_used_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped in the middle of a call, and evicted; when it goes on it has the others' memory in hand."""
    stopped, reached, goes_on = threading.Event(), threading.Event(), threading.Event()
    leave = Rendezvous.leave_memory

    def stops(self: Rendezvous, joint: JointCall) -> None:
        if self._name == "worker-1" and stopped.is_set():
            reached.set()
            goes_on.wait(PATIENCE)
        leave(self, joint)

    monkeypatch.setattr(Rendezvous, "leave_memory", stops)
    with local_job(workers=3, folder=str(tmp_path), wait_seconds=PATIENCE) as job:
        together(job, lambda me: collectives.all_reduce(LARGE))
        staging = {k: job[k].collectives.calls.memories.by_purpose["staging"][0] for k in (0, 2)}
        stopped.set()
        thread = later(lambda: reached.wait(PATIENCE) and job.kill("worker-1"), [job[0], job[2]])
        threading.Thread(target=lambda: together(job, _fails, ranks=[1]), name="stopped", daemon=True).start()
        assert len(messages(together(job, lambda me: collectives.all_reduce(LARGE), ranks=[0, 2]))) == 2
        thread.join(PATIENCE)
        wait_until(lambda: job[0].world_size == job[2].world_size == 2)
        together(job, lambda me: collectives.all_reduce(LARGE), ranks=[0, 2])
        assert all(job[k].collectives.calls.memories.by_purpose["staging"][0] != staging[k] for k in (0, 2))
        goes_on.set()


def _fails(me: Any) -> None:
    with contextlib.suppress(SynclineError):
        collectives.all_reduce(LARGE)


def test_a_death_before_the_first_call(fresh: LocalJob) -> None:
    """It was never connected: who waits for its connection is told, too."""
    thread = later(lambda: fresh.kill("worker-2"), [fresh[0], fresh[1]])
    for told in messages(together(fresh, lambda me: collectives.all_reduce(LARGE), ranks=[0, 1])):
        assert "worker-2 is gone" in told
    thread.join()


def test_a_group_with_one_who_is_gone(fresh: LocalJob) -> None:
    def work(me: Any) -> str:
        group = collectives.group([0, 1])
        collectives.barrier(group=group)
        if me.rank == 1:
            return "killed"
        fresh.kill("worker-1")
        wait_until(lambda: fresh[0].world_size == 2)
        with pytest.raises(CollectiveError) as caught:
            collectives.barrier(group=group)
        return str(caught.value)

    told = "worker-1 of this group is gone; make a new group of the workers that are left"
    assert together(fresh, work, ranks=[0, 1])[0] == told


def test_one_who_leaves_between_two_calls(fresh: LocalJob) -> None:
    """The others' call is that of those who are left: it has said goodbye, and is in no call."""
    assert together(fresh, lambda me: collectives.all_reduce(1)) == [3, 3, 3]

    def work(me: Any) -> Any:
        if me.rank == 1:
            time.sleep(0.2)
            me.close()
            return None
        return collectives.all_reduce(LARGE)

    first, left, last = together(fresh, work)
    assert left is None
    assert (first == 2).all() and (last == 2).all()


def test_one_who_comes(fresh: LocalJob) -> None:
    """Calls are made again with the new one in it, though not all have heard of it at the same time; they cannot
    meet its first call, and all go on together after a restart."""
    assert together(fresh, lambda me: collectives.all_reduce(1)) == [3, 3, 3]
    make_job = fresh.process.make_job
    # The others hear of it before it can be reached.
    fresh.process.make_job = lambda *given, **more: (time.sleep(0.2), make_job(*given, **more))[1]  # type: ignore
    thread = later(lambda: fresh.add_worker("worker-3"))

    def work(me: Any) -> int:
        deadline = time.monotonic() + PATIENCE
        while me.rank != 3 and time.monotonic() < deadline:
            try:
                assert collectives.all_reduce(1) == 3
            except CollectiveError as error:
                assert str(error).startswith("worker-3 began its script after worker-0")
                break
            time.sleep(0.01)
        collectives.restart()
        return int(collectives.all_reduce(1))

    joining = later(lambda: (thread.join(), found.extend(together(fresh, work, ranks=[3]))))
    found: list[Any] = []
    assert together(fresh, work, ranks=[0, 1, 2]) == [4, 4, 4]
    joining.join()
    assert found == [4]


def test_a_wait_has_an_end_and_says_for_whom(tmp_path: Any) -> None:
    """The one who comes late is told what has become of it; and then all are level."""
    with local_job(workers=2, folder=str(tmp_path)) as job:
        assert together(job, lambda me: collectives.all_reduce(1)) == [2, 2]
        patient = job[0].config
        job[0].config = msgspec.structs.replace(patient, wait_seconds=0.5)
        (late,) = together(job, lambda me: collectives.all_reduce(LARGE), ranks=[0])
        job[0].config = patient
        assert isinstance(late, WaitTimeout)
        assert str(late) == "worker-0: all_reduce of float32[200000] has waited 0.5 s for worker-1"
        (told,) = messages(together(job, lambda me: collectives.all_reduce(LARGE), ranks=[1]))
        assert told == f"CollectiveError: worker-0 has given up: {late}"
        assert together(job, lambda me: collectives.all_reduce(1)) == [2, 2]


def test_the_end_of_the_job_ends_a_wait(tmp_path: Any) -> None:
    with local_job(workers=2, folder=str(tmp_path)) as job:
        thread = later(lambda: job.fail("worker-1", "as a test wants it"), [job[0]])
        (told,) = messages(together(job, lambda me: collectives.barrier(), ranks=[0]))
        thread.join()
        assert told.startswith(("JobFailed: the job has ended: worker-1", "CollectiveError: worker-1"))


def test_tickets_of_a_job_that_ends(tmp_path: Any) -> None:
    """What was not waited for is finished before a worker leaves."""
    with local_job(workers=2, folder=str(tmp_path)) as job:

        def work(me: Any) -> Any:
            ticket = collectives.all_reduce(LARGE, wait=False)
            me.close()
            return ticket.done() and float(ticket.wait(0.0)[0])

        assert together(job, work) == [2.0, 2.0]


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
