"""Spans of members at a real coordinator: written down, bounded, and harmless."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

import pytest
from tests.coordinator.played import Job, jobs, until

from syncline.core.tracing import MOST_SPANS, Knot, PhaseSpan, TracedBatch
from syncline.core.wire.tracing import GiveSpans, GotSpans
from syncline.errors import ProtocolError
from syncline.store import lines
from syncline.store.lines import SPANS, Lines

__all__ = ["jobs"]

Jobs = Callable[..., Job]
SPAN = PhaseSpan(0, 1, 5, 7)


def written(folder: pathlib.Path) -> list[TracedBatch]:
    return list(Lines(folder / SPANS, TracedBatch))


def test_spans_are_written_and_the_answer_has_the_time(jobs: Jobs, tmp_path: pathlib.Path) -> None:
    job = jobs(trace=True).begin()
    tracing = job.coordinator.tracing
    tracing.start(tmp_path)
    before = time.time()
    answer = job["worker-0"].ask(GiveSpans(1, 12, [SPAN], Knot(1, 2, 3), 4))
    job["server-0"].ask(GiveSpans(1, 13, []))
    assert isinstance(answer, GotSpans) and before <= answer.at <= time.time()
    with pytest.raises(ProtocolError, match="at most"):
        job["worker-0"].ask(GiveSpans(2, 12, [SPAN] * (MOST_SPANS + 1)))
    tracing.close()
    one, two = written(tmp_path)
    assert (one.member, one.role, one.number, one.sent, one.spans) == ("worker-0", "worker", 1, 12, [SPAN])
    assert (one.knot, one.dropped, one.received) == (Knot(1, 2, 3), 4, answer.at) and one.host
    assert (two.member, two.role, two.spans) == ("server-0", "server", [])


def test_a_job_that_is_not_traced_writes_nothing(jobs: Jobs, tmp_path: pathlib.Path) -> None:
    """A member that sends spans all the same gets its answer."""
    job = jobs().begin()
    job.coordinator.tracing.start(tmp_path)
    assert isinstance(job["worker-0"].ask(GiveSpans(1, 12, [SPAN])), GotSpans)
    job.coordinator.tracing.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_once_and_members_go_on(
    jobs: Jobs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs(trace=True).begin()
    said: list[str] = []
    monkeypatch.setattr(job.coordinator.job, "log_line", said.append)
    monkeypatch.setattr("syncline.coordinator.tracing.AGAIN_SECONDS", 0.0)
    is_full, real = True, lines.os.write

    def write(descriptor: int, data: bytes) -> int:
        if is_full:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(lines.os, "write", write)
    job.coordinator.tracing.start(tmp_path)
    for number in range(1, 5):
        assert isinstance(job["worker-0"].ask(GiveSpans(number, 12, [SPAN])), GotSpans)
    until(lambda: len(said) == 1 and job.coordinator.tracing.num_unwritten == 0, "all were tried")
    is_full = False
    job["worker-0"].ask(GiveSpans(5, 12, [SPAN]))
    job.coordinator.tracing.close()
    assert [one.number for one in written(tmp_path)][-1] == 5
    assert len(said) == 1 and "No space left" in said[0]
