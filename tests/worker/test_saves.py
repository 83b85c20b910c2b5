"""A worker's part in saves: what it notes, when it says so, what it writes, and what it takes up again."""

from __future__ import annotations

import concurrent.futures
import random
import threading
import time
import types
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.leased import FakeScript
from tests.patience import PATIENCE
from tests.saved_scripts import NAME, Asker, finish, resumes

from syncline import Rule
from syncline.core.wire.checkpoints import Finish, Noted, Save, Saved, WriteScript
from syncline.core.wire.message import Done
from syncline.core.wire.pace import Pace
from syncline.errors import ConfigError, StoreError, WaitTimeout
from syncline.worker.checkpoint import resume
from syncline.worker.checkpoint.boundary import Boundary

SECONDS = PATIENCE


class Counter:
    """Something of a script's."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def begin(house: Any, **settings: Any) -> tuple[Any, Any, Any]:
    twin = house(2, slice_bytes=64, **settings)
    twin.job.kv.register({"w": np.zeros(32)}, Rule("SGD", lr=1.0))
    return twin, twin.job, Asker(twin.coordinator.endpoints[0])


def step(job: Any) -> None:
    job.kv.push_pull({"w": np.ones(32)}).wait()


def until(is_so: Any) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_state_of_the_cut_is_written_and_comes_back(house, tmp_path):
    _, job, asker = begin(house)
    counter = job.state["counter"] = Counter()
    job.state["seen"] = seen = [0]
    told, drawn = asker.expect(), {}
    for clock in range(1, 6):
        step(job)
        drawn[clock] = random.getstate()
        counter.count, seen[0] = counter.count + 1, clock
        random.random()
        if clock == 3:
            assert isinstance(told.wait(SECONDS), Noted)
    script = asker.written(tmp_path / NAME, 4)
    assert (script.worker, script.clock) == ("worker-0", 4)
    digest = finish(tmp_path / NAME, script)

    twin = house(2, slice_bytes=64)
    again, fresh, mine = twin.job, Counter(), [7]
    resumes(again, tmp_path / NAME, digest)
    again.state["counter"], again.state["seen"] = fresh, mine
    assert (fresh.count, mine, again.state["seen"]) == (3, [3], [3])  # behind step 4, before the script went on
    assert again.state["counter"] is fresh
    fresh.count = 99
    again.put_back()
    assert fresh.count == 3 and random.getstate() == drawn[4]


def test_it_says_done_only_when_no_cut_can_lie_before_what_it_noted(house, tmp_path):
    """A commit that is under way may not be in the cut: the state before it would be wanted, and nobody has it."""
    twin, job, asker = begin(house, policy="async", window=2)
    held, pools = threading.Event(), []
    for server in twin.servers.values():
        kept, in_order = server.answer, concurrent.futures.ThreadPoolExecutor(1)
        pools.append(in_order)

        def answer(request: Any, message: Any, kept: Any = kept, in_order: Any = in_order) -> Any:
            if type(message).__name__ in ("Stage", "CommitStaged") and not held.is_set():
                late = lambda: held.wait(SECONDS) and request.reply(kept(request, message))  # noqa: E731
                in_order.submit(late)
                return None
            return kept(request, message)

        server.answer = answer
    ticket = job.kv.push({"w": np.ones(32)})
    told = asker.expect()
    second = job.kv.push({"w": np.ones(32)})
    with pytest.raises(WaitTimeout):
        told.wait(0.2)
    held.set()
    ticket.wait()
    second.wait()
    step(job)
    assert isinstance(told.wait(SECONDS), Noted)
    for pool in pools:
        pool.shutdown()


def test_a_clock_that_was_passed_before_it_was_told_is_refused(house, tmp_path):
    _, job, asker = begin(house)
    for _ in range(3):
        step(job)
    told = asker.expect()
    step(job)
    step(job)
    assert isinstance(told.wait(SECONDS), Noted)
    for clock in (1, 3):
        with pytest.raises(StoreError, match="when it noted its state first"):
            asker.written(tmp_path, clock)
    assert asker.written(tmp_path, 4).clock == 4


def test_a_boundary_that_is_still_to_come_is_waited_for(house, tmp_path):
    _, job, asker = begin(house)
    asker.expect()
    step(job)
    step(job)
    writing = asker.write(tmp_path, 3)
    with pytest.raises(WaitTimeout):
        writing.wait(0.1)
    job.state["x"] = 5
    step(job)
    assert writing.wait(SECONDS).script.clock == 3


def test_a_script_that_waits_is_noted_by_the_thread_that_hears(house, tmp_path):
    _twin, job, asker = begin(house)
    step(job)
    job.state["x"] = 1
    with job.boundary.waiting(("barrier", "b", 1)):
        assert isinstance(asker.expect().wait(SECONDS), Noted)
        assert asker.written(tmp_path, 1).clock == 1


def test_a_note_is_whole_before_the_script_goes_on(house, monkeypatch):
    monkeypatch.setattr(resume, "NOTE_SECONDS", SECONDS)  # no note for a restart comes between
    _, job, asker = begin(house)
    step(job)
    inside, go_on, order = threading.Event(), threading.Event(), []

    class Slow(Counter):
        def state_dict(self) -> dict[str, int]:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(SECONDS)
                order.append("noted")
            return super().state_dict()

    job.state["slow"] = Slow()
    with job.boundary.waiting():
        told = asker.expect()
        assert inside.wait(SECONDS)
        threading.Timer(0.05, go_on.set).start()
    order.append("went on")
    assert isinstance(told.wait(SECONDS), Noted) and order == ["noted", "went on"]


def test_what_cannot_be_saved_is_refused_when_it_is_given_and_said_when_it_became_so(house, monkeypatch):
    monkeypatch.setattr(resume, "NOTE_SECONDS", SECONDS)  # a note for a restart would say it too
    twin, job, asker = begin(house)
    with pytest.raises(ConfigError, match=r"job\.state\['f'\]: a function cannot be saved"):
        job.state["f"] = lambda: 0
    job.state["list"] = found = [1]
    found.append(object())
    told = asker.expect()
    step(job)
    with pytest.raises(StoreError, match=r"job\.state\['list'\]\[1\]: an object cannot be saved"):
        told.wait(SECONDS)
    step(job)
    assert sum("cannot be saved" in line for line in twin.said) == 1


def test_after_the_end_of_a_save_nothing_is_kept_and_nobody_looks(house, tmp_path):
    _, job, asker = begin(house)
    asker.expect()
    step(job)
    asker.end()
    until(lambda: not job.debug_state().is_boundary_watched)
    assert job.debug_state().num_save_notes == 0
    with pytest.raises(StoreError, match="told nothing of save 1"):
        asker.written(tmp_path, 1)
    told = asker.expect(2)
    step(job)
    step(job)
    assert isinstance(told.wait(SECONDS), Noted)
    assert asker.written(tmp_path, 2, 2).clock == 2


def test_a_newer_save_takes_the_place_of_the_one_before(house):
    _, job, asker = begin(house)
    first, second = asker.expect(1), asker.expect(2)
    with pytest.raises(StoreError, match="save 2 has begun"):
        first.wait(SECONDS)
    step(job)
    step(job)
    assert isinstance(second.wait(SECONDS), Noted)
    with pytest.raises(StoreError, match="save 1 is over"):
        asker.expect(1).wait(SECONDS)


def test_a_folder_that_cannot_be_written_is_an_answer(house, tmp_path):
    _, job, asker = begin(house)
    asker.expect()
    step(job)
    (tmp_path / "file").write_text("")
    message = WriteScript(1, 1, str(tmp_path / "file"), "worker-0.script.safetensors")
    with pytest.raises(StoreError):
        asker.endpoint.call(message).wait(SECONDS)
    step(job)


def test_save_needs_a_place(house):
    _, job, _ = begin(house)
    with pytest.raises(ConfigError, match="--checkpoint DIR"):
        job.save()


def test_save_is_a_boundary_of_its_own(house, tmp_path):
    twin, job, asker = begin(house, checkpoint=str(tmp_path))
    job.checkpoints.resume.is_over = job.checkpoints.resume.is_known = True
    step(job)
    job.state["x"] = 5

    def save(message: Save) -> Saved:
        assert isinstance(asker.expect().wait(SECONDS), Noted)
        assert asker.written(tmp_path / NAME, 1).clock == 1
        return Saved("000001-step-1", 1)

    _in_a_thread(twin, Save, save)
    assert job.save() == "000001-step-1"


def test_a_save_that_others_cannot_come_to_is_not_waited_for_and_said_once(house, tmp_path):
    twin, job, _ = begin(house, checkpoint=str(tmp_path))
    job.checkpoints.resume.is_over = job.checkpoints.resume.is_known = True
    _in_a_thread(twin, Save, lambda message: Saved("", 1))
    for _ in range(2):
        step(job)
        assert job.save() == ""
    assert sum("saved with the next step" in line for line in twin.said) == 1


def test_a_worker_that_is_held_by_hand_stands_at_a_boundary(house, tmp_path):
    twin, job, asker = begin(house)
    step(job)
    twin.handlers.pacing.hear(Pace("worker-0", is_paused=True))
    script = threading.Thread(target=step, args=(job,), daemon=True)
    script.start()
    try:
        assert isinstance(asker.expect().wait(SECONDS), Noted)
        assert asker.written(tmp_path, 1).clock == 1
    finally:
        twin.handlers.pacing.hear(Pace("worker-0"))
    script.join(SECONDS)
    assert job.own_step == 2


def _in_a_thread(twin: Any, kind: type, act: Any) -> None:
    """The twin's coordinator answers when this is done, and hears meanwhile."""
    kept = twin.coordinator.handle

    def handle(request: Any) -> None:
        if isinstance(request.message, kind):
            threading.Thread(target=lambda: request.reply(act(request.message)), daemon=True).start()
        else:
            kept(request)

    twin.coordinator.handle = handle


def test_at_its_end_a_worker_stays_until_the_last_save_is_made(house, tmp_path):
    twin, job, asker = begin(house, checkpoint=str(tmp_path))
    step(job)
    patient = job.config.wait_seconds
    msgspec.structs.force_setattr(job.config, "wait_seconds", 0.2)
    order = []

    def last(message: Finish) -> Done:
        time.sleep(0.5)  # longer than any other wait may take
        msgspec.structs.force_setattr(job.config, "wait_seconds", patient)
        assert isinstance(asker.expect().wait(SECONDS), Noted)
        order.append(asker.written(tmp_path / NAME, 1).clock)
        return Done()

    _in_a_thread(twin, Finish, last)
    job.close()
    assert order == [1]
    names = [type(message).__name__ for message in twin.coordinator.heard]
    assert names[-1] == "Leave"


@pytest.mark.parametrize("how", ["retires first", "retires meanwhile"])
def test_a_worker_that_retires_does_not_stay(house, tmp_path, how):
    twin, job, _ = begin(house, checkpoint=str(tmp_path))
    step(job)
    answered: list[Finish] = []
    may_answer = threading.Event()

    def last(message: Finish) -> Done:
        time.sleep(0.1)
        job.retire()
        may_answer.wait(SECONDS)
        answered.append(message)
        return Done()

    _in_a_thread(twin, Finish, last)
    if how == "retires first":
        job.retire()
        with pytest.raises(SystemExit):
            step(job)
    else:
        job.close()
    left = [message for message in twin.coordinator.heard if type(message).__name__ == "Leave"]
    assert [message.retired for message in left] == [True] and not answered
    may_answer.set()


def test_a_boundary_costs_nothing_but_a_look_while_nobody_watches():
    class Reading:
        num_loops = 0

        @property
        def is_any_held(self) -> bool:
            pytest.fail("looked")

    script = FakeScript()
    boundary = Boundary(script, Reading())
    for script.clock in range(3):
        boundary.passed(("loop", "a", 0))
        boundary.hands_out()
        with boundary.waiting():
            pass
    assert boundary.stride == 1, "which steps lie between two is counted all the same"
    boundary.watch(types.SimpleNamespace(at=None, handed_out=None))
    with pytest.raises(pytest.fail.Exception, match="looked"):
        boundary.passed(("loop", "a", 0))


def test_several_commits_between_two_boundaries_are_one_step():
    """Two optimizers: a cut between their commits has the batch in it, so the state behind it is the right one."""
    script, seen = FakeScript(), []
    boundary = Boundary(script, script)

    class Watch:
        def at(self, position: Any, after: int, clock: int, *, waits: bool) -> None:
            seen.append((after, clock))

        def handed_out(self) -> None: ...

    boundary.watch(Watch())
    for script.clock in (0, 2, 4, 4):
        boundary.passed(("loop", "a", 0))
    assert seen == [(-1, 0), (0, 2), (2, 4), (3, 4)]
