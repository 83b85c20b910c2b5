"""Stop rules at the coordinator: readings of played workers; kept before it is told, told to every life."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import msgspec
import pytest
from tests.coordinator.played import Disk, Played, ask, jobs, until, watching
from tests.patience import PATIENCE

from syncline.core.leasing.loader import Loader
from syncline.core.metrics import Metrics, Steer
from syncline.core.stopping import NEXT, Stop, from_checkpoint
from syncline.core.wire.control import AskStatus, Leave, Rejoin, Watch
from syncline.core.wire.leases import AskLease, GivenLease, Opened, OpenEpoch
from syncline.core.wire.pace import Pace
from syncline.errors import ConfigError, ProtocolError
from syncline.testing import local_job

__all__ = ["jobs"]
FIRED = "--stop 'loss<1': loss = 0.5 at step 7"


class Reporter:
    """A played worker that counts its reports."""

    def __init__(self, worker: Played) -> None:
        self.worker, self.number = worker, 0

    def report(self, step: int = 7, **values: float) -> Steer:
        self.number += 1
        answer = self.worker.ask(Metrics(self.number, {n: (v, 1.0) for n, v in values.items()}, step))
        assert isinstance(answer, Steer)
        return answer


def begun(jobs: Any, **settings: Any) -> tuple[Any, Reporter, Reporter]:
    job = jobs(workers=2, servers=1, **settings).begin()
    return job, Reporter(job["worker-0"]), Reporter(job["worker-1"])


def test_a_whole_reading_fires_and_everybody_hears_of_it(jobs: Any) -> None:
    job, one, two = begun(jobs, stop=("loss<1",))
    assert one.report(loss=0.4) == Steer() and not job["worker-1"].all(Steer)
    assert two.report(loss=0.6) == Steer(1, FIRED, 1.0)
    assert [steer.stop for steer in job["worker-0"].all(Steer)] == [FIRED]
    assert job.disk.last.steering.stop == Stop("--stop 'loss<1'", "loss = 0.5 at step 7", 7)
    status = ask(job, AskStatus()).status
    assert status.stop == FIRED and status.readings == {"loss": 0.5}
    standings = ask(job, Watch())
    assert standings.stop == FIRED and standings.readings == {"loss": 0.5}
    assert f"training stops by {FIRED}; {NEXT}" in job.log
    job["worker-0"].ask(Leave())
    job["worker-1"].ask(Leave())
    assert f"stopped by {FIRED}" in job.log and "last readings: loss 0.5" in job.log


@pytest.mark.parametrize("is_watched", [True, False])
def test_the_last_numbers_are_said_by_the_launcher_where_one_watches(jobs: Any, is_watched: bool) -> None:
    """Its table has them; a job that was started role by role has no launcher."""
    job, one, two = begun(jobs, stop=("loss<1",))
    with watching(job) if is_watched else contextlib.nullcontext():
        for worker in (one, two):
            worker.report(loss=0.5)
        for worker in (one, two):
            worker.worker.ask(Leave())
    said = {f"stopped by {FIRED}", "last readings: loss 0.5"}
    assert said <= set(job.coordinator.job.events), "for syncline status"
    assert said & set(job.log) == (set() if is_watched else said)


def test_it_is_kept_before_anybody_is_told_and_decided_again_when_it_could_not_be(jobs: Any) -> None:
    job, one, two = begun(jobs, stop=("loss<1",))
    one.report(loss=0.4)
    job.disk.full = True
    assert two.report(loss=0.6) == Steer() and not job["worker-0"].all(Steer)
    job.disk.full = False
    one.report(loss=0.4)
    assert two.report(loss=0.6).stop == FIRED


def test_a_coordinator_that_died_has_left_the_stop_the_factor_and_the_plateau(jobs: Any) -> None:
    settings = {"stop": ("loss.plateau(2)",), "on_plateau": "lr*0.1"}
    job, one, two = begun(jobs, **settings)
    for _ in range(3):
        one.report(loss=1.0)
        two.report(loss=1.0)
    assert job.disk.last.steering.factor == pytest.approx(0.1)
    second = jobs(disk=job.disk, workers=2, servers=1, **settings)
    again = [_come_back(second, job, name) for name in ("worker-0", "worker-1")]
    until(lambda: all(w.all(Steer) for w in again), "the same lives hear of it over new connections")
    assert [steer.factor for w in again for steer in w.all(Steer)] == pytest.approx([0.1, 0.1])
    one.worker, two.worker = again
    for _ in range(2):
        one.report(loss=1.0)
        steer = two.report(loss=1.0)
    assert "loss.plateau(2)" in steer.stop and steer.factor == pytest.approx(0.1)
    second.coordinator.members.evict("worker-1", "was killed")
    new = second.play("worker", "worker-1")
    assert new.joined(new.ask_to_join()).late
    until(lambda: [s.stop for s in new.all(Steer)] == [steer.stop], "and so does the next life")
    time.sleep(0.2)
    assert len(new.all(Steer)) == 1, "once is enough"


def _come_back(job: Any, before: Any, name: str) -> Played:
    worker = job.members[name] = Played(job, "worker", name)
    worker.incarnation = worker.stamp.incarnation = before[name].incarnation
    worker.ask(Rejoin(name, worker.incarnation))
    return worker


def test_what_is_counted_is_kept_soon(jobs: Any) -> None:
    job, one, two = begun(jobs, stop=("loss.plateau(9)",))
    one.report(loss=1.0)
    two.report(loss=1.0)
    one.report(loss=1.0)
    two.report(loss=1.0)
    until(lambda: [c.num_worse for c in job.disk.last.steering.plateaus.values()] == [1], "kept")


def test_who_is_gone_is_not_waited_for(jobs: Any) -> None:
    job, one, _ = begun(jobs, stop=("loss<1",))
    assert one.report(loss=0.5) == Steer() and not job["worker-0"].all(Steer), "half of them is no reading"
    job.coordinator.members.evict("worker-1", "was killed")
    until(lambda: [s.stop for s in job["worker-0"].all(Steer)] == [FIRED], "a reading without the dead one")


def test_a_report_said_again_counts_once(jobs: Any) -> None:
    job, one, _ = begun(jobs)
    one.report(loss=1.0)
    one.number -= 1
    one.report(loss=9.0)
    assert job.coordinator.membership.state.metrics.reports["loss"].sums == {"worker-0": (1.0, 1.0, 1)}


def test_after_a_stop_nothing_is_handed_out_and_nobody_waits(jobs: Any) -> None:
    job, one, two = begun(jobs, stop=("loss<1",))
    data = Loader(100, 10)
    for name in ("worker-0", "worker-1"):
        job[name].ask(OpenEpoch("train", 0, data))
    while job["worker-0"].ask(AskLease("train", 0, [])).lease:
        pass
    waiting = job["worker-0"].endpoint.call(AskLease("train", 0, [], waits=True))
    assert not waiting.arrives(0.05)
    one.report(loss=0.5)
    two.report(loss=0.5)
    answer = waiting.wait(PATIENCE)
    assert isinstance(answer, GivenLease) and not answer.lease and not answer.is_finished
    assert job["worker-0"].heard[-1].stop == FIRED, "it hears of the stop before that"
    assert job["worker-1"].ask(AskLease("train", 0, [])).lease == 0
    assert job["worker-1"].ask(OpenEpoch("train", 1, data)) == Opened(False)
    assert job["worker-1"].ask(OpenEpoch("validate:0", 0, data)) == Opened(True)
    assert job["worker-1"].ask(AskLease("validate:0", 0, [])).lease


def test_max_time_counts_what_was_trained_before(jobs: Any) -> None:
    job, _, _ = begun(jobs, max_time="0.3s")
    until(lambda: bool(job["worker-1"].all(Steer)), "told")
    stop = job["worker-1"].all(Steer)[0].stop
    assert re.fullmatch(r"--max-time 0\.3s: trained (0\.[3-9]|[1-9])[\d.]*[smh]", stop), stop
    other = jobs(workers=1, servers=1, max_time="1h")
    other.coordinator.membership.state.steering = from_checkpoint({"factor": 0.5}, 3599.9)
    other.begin()
    until(lambda: len(other["worker-0"].all(Steer)) == 2, "the factor, then the stop")
    assert other["worker-0"].all(Steer)[0] == Steer(1, "", 0.5)
    stop = other["worker-0"].all(Steer)[1].stop
    assert re.fullmatch(r"--max-time 1h: trained 1(\.\d+)?h", stop), stop
    assert other.coordinator.job.clock.seconds() > 3599.9


def test_time_goes_on_through_the_coordinators_death(jobs: Any) -> None:
    began = time.monotonic()
    job, _, _ = begun(jobs, max_time="1h")
    job.coordinator.stop_rules.state.seconds = 100.0
    with job.coordinator.job.lock:
        job.coordinator.job.keep()
    for at_barrier, counted in ((20.0, 20.0), (1000.0, 60.0), (-1000.0, 0.0)):
        state = job.disk.last
        state.steering.counted_at -= at_barrier  # the clock of the wall may jump; nobody trains so long without one
        disk = Disk()
        disk.save(msgspec.msgpack.encode(state))
        second = jobs(disk=disk, workers=2, servers=1, max_time="1h")
        found = second.coordinator.job.clock.seconds()
        assert 100.0 + counted < found < 110.0 + counted + time.monotonic() - began


def test_a_metric_that_nobody_reports_is_named_once_and_at_the_end(jobs: Any) -> None:
    job, one, two = begun(jobs, stop=("acuracy>0.9",))
    sentence = "--stop: no worker has reported 'acuracy'; reported are: accuracy; did you mean 'accuracy'?"
    for number in range(110):
        one.report(accuracy=0.1)
        two.report(accuracy=0.1)
        assert (sentence in job.log) == (number >= 99)
    assert job.log.count(sentence) == 1
    job["worker-0"].ask(Leave())
    job["worker-1"].ask(Leave())
    assert job.log.count(sentence) == 2


def test_max_steps_by_a_workers_word(jobs: Any) -> None:
    _, one, _ = begun(jobs, max_steps=7)
    assert one.report(step=6) == Steer()
    assert one.report(step=7).stop == "--max-steps 7: step 7"


def test_only_workers_report_and_only_the_coordinator_steers(jobs: Any) -> None:
    job, _, _ = begun(jobs)
    for name, message in (("server-0", Metrics(1, {})), ("worker-0", Steer(9, "stop"))):
        with pytest.raises((ProtocolError, ConnectionError)):
            job[name].ask(message)
    assert ask(job, Pace("worker-1")) is not None


def test_rules_are_checked_before_a_job_begins() -> None:
    with pytest.raises(ConfigError, match="did you mean 'plateau'"), local_job(stop=("loss.platau(3)",)):
        pass
