"""The rows about showing a job: what its page, its browser and its sinks take, in processor time of a step; and what
`--trace` takes."""

from __future__ import annotations

import dataclasses
import http.client
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.match import Gauge, play
from benchmarks.processor import check_is_measured, seconds_of
from benchmarks.row import Effort, NotMeasured, Reach, Row, Samples
from benchmarks.sides import WAIT_SECONDS, JobSide
from benchmarks.task import Task
from syncline.errors import WaitTimeout

#: What is done once a second must be in a turn several times.
TURN_SECONDS, ROW_SECONDS = 6.0, 600.0


class ShownJob(JobSide):
    """A job with a page, and a browser that follows it."""

    num_looks = 0  #: that the browser has got

    def open_page(self) -> None:
        """Returns when the browser has got something: from then on the page's thread has its packages."""
        found = re.search(r"the page: http://([^/]+)(/open\S+)", "\n".join(self.lines))
        if found is None:
            raise NotMeasured("needs the extra page: pip install 'syncline[page]'")
        threading.Thread(target=self._browse, args=found.groups(), name="browser", daemon=True).start()
        until = time.monotonic() + WAIT_SECONDS
        while not self.num_looks:
            self.look()
            if time.monotonic() > until:
                raise WaitTimeout(f"the page has shown nothing for {WAIT_SECONDS:g} s")
            time.sleep(0.05)

    def _browse(self, address: str, path: str) -> None:
        for line in follow(address, path):
            self.num_looks += line.startswith(b"data: ")


def follow(address: str, path: str) -> Iterator[bytes]:
    """Opens the page by its link, as a browser does, and reads the stream of looks until it ends."""
    connection = http.client.HTTPConnection(address, timeout=WAIT_SECONDS)
    connection.request("GET", path)
    with connection.getresponse() as answer:
        cookie = str(answer.getheader("set-cookie")).partition(";")[0]
        answer.read()
    connection.request("GET", "/api/v1/stream", headers={"Cookie": cookie})
    stream = connection.getresponse()
    try:
        while line := stream.readline():
            yield line
    except OSError:
        return  # the job has ended
    finally:
        connection.close()


class Spent:
    """Processor time of all processes of two jobs, turn by turn: a job that has no turn is not charged."""

    def __init__(self, pids: Mapping[str, Mapping[str, int]]) -> None:
        """`pids`: side -> member -> process."""
        self._pids = pids
        self._before: dict[str, float] = {}
        self._at = time.monotonic()

    def gauge(self, side: str) -> Gauge:
        """Processor seconds per operation of this side since the last turn of either."""
        return lambda num_operations: self._since(side)[0] / num_operations

    def in_a_second(self, side: str, besides: float = 0.0) -> Gauge:
        """Processor seconds in a second of a turn; `besides`: so many more."""

        def since(num_operations: int) -> float:
            spent, seconds = self._since(side)
            return spent / seconds + besides

        return since

    def _since(self, side: str) -> tuple[float, float]:
        now = {one: seconds_of(pids.values()) for one, pids in self._pids.items()}
        spent, seconds = now[side] - self._before.get(side, 0.0), time.monotonic() - self._at
        self._before, self._at = now, time.monotonic()
        return spent, max(seconds, 1e-9)


class Coordinator(Mapping[str, int]):
    """The coordinator's process alone, of the processes of a job."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids

    def __getitem__(self, name: str) -> int:
        return {key: pid for key, pid in self._pids.items() if key == "coordinator"}[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._pids if name == "coordinator")

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _longer(effort: Effort) -> Effort:
    return dataclasses.replace(
        effort,
        turn_seconds=max(effort.turn_seconds, TURN_SECONDS),
        row_seconds=max(effort.row_seconds, ROW_SECONDS),
    )


def _sides(model: str, effort: Effort) -> tuple[ShownJob, JobSide, Effort]:
    """A job as it is by default, and one without page and sinks."""
    check_is_measured()
    task = Task(kind="train_told", model=model, num_threads=1)
    ours = ShownJob(task, workers=2, transport="shm")
    plain = JobSide(task, workers=2, side="reference", transport="shm", page="off", sink=["off"])
    return ours, plain, _longer(effort)


def _played(ours: ShownJob, plain: JobSide, effort: Effort, of_ours: Gauge, of_plain: Gauge) -> Samples:
    """With a browser on the page from the first turn on."""

    def opened(num_operations: int) -> float:
        if not ours.num_looks:
            ours.open_page()
        return of_ours(num_operations)

    return play(ours, plain, effort, gauges={"ours": opened, "reference": of_plain})


def showing(name: str, model: str, what: str, *, reach: Reach) -> Row:
    """A job as it is by default, with a browser on its page, beside one without page and sinks."""

    def measure(effort: Effort) -> Samples:
        ours, plain, longer = _sides(model, effort)
        spent = Spent({"ours": ours.pids, "reference": plain.pids})
        return _played(ours, plain, longer, spent.gauge("ours"), spent.gauge("reference"))

    return Row(
        name=name,
        what=f"processor time of a step, all processes of the job, {what}, 2 workers, with page, browser and sinks",
        reference="the same with --page off --sink off",
        reach=reach,
        measure=measure,
    )


def showing_alone(name: str, model: str, what: str, besides: float, *, reach: Reach) -> Row:
    """The coordinator of a job that is shown, beside one of a job that is not and so much of a core.

    All that a page, a browser and sinks take is taken there. Where other programs keep the machine busy, the workers'
    own time differs from turn to turn by more than that, and this tells more than `showing`.
    """

    def measure(effort: Effort) -> Samples:
        ours, plain, longer = _sides(model, effort)
        spent = Spent({"ours": Coordinator(ours.pids), "reference": Coordinator(plain.pids)})
        return _played(ours, plain, longer, spent.in_a_second("ours"), spent.in_a_second("reference", besides))

    return Row(
        name=name,
        what=f"processor time of the coordinator in a second, {what}, 2 workers, with page, browser and sinks",
        reference=f"the same with --page off --sink off, and {besides:.0%} of a core",
        reach=reach,
        measure=measure,
    )


def tracing(name: str, task: Task, what: str, *, reach: Reach) -> Row:
    """A job that keeps when each phase of every step began and ended, beside one that does not."""

    def measure(effort: Effort) -> Samples:
        check_is_measured()
        hidden: dict[str, Any] = {"workers": 2, "transport": "shm", "page": "off", "sink": ["off"]}
        ours, plain = JobSide(task, trace=True, **hidden), JobSide(task, side="reference", **hidden)
        spent = Spent({"ours": ours.pids, "reference": plain.pids})
        gauges = {"ours": spent.gauge("ours"), "reference": spent.gauge("reference")}
        return play(ours, plain, _longer(effort), gauges=gauges)

    return Row(
        name=name,
        what=f"processor time of a step, all processes of the job, {what}, 2 workers, with --trace",
        reference="the same without --trace",
        reach=reach,
        measure=measure,
    )
