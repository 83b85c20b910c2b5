"""`job.steps(n)`: the loop of a script that has no data set. Steps of the job are leased as samples are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from syncline.core.leasing.loader import MOST_SAMPLES, Loader
from syncline.errors import ConfigError
from syncline.worker.loop import Loop

if TYPE_CHECKING:
    from syncline.worker.job import Job


def steps(job: Job, count: object) -> Iterator[int]:
    """The numbers of the steps that are this worker's to make. The loop is opened here and now."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_SAMPLES:
        raise ConfigError(f"job.steps({count!r}): give the number of steps, an int from 0 on")
    name = job.samples.name_steps()
    job.samples.begin_run(name, 0, 1)
    return _steps(job, Loop(job, name, 0, Loader(count, 1, is_steps=True))) if count else iter(())


def _steps(job: Job, loop: Loop) -> Iterator[int]:
    with loop:
        if job.in_rounds and not loop.reading.is_finished:
            job.exchange.enter()  # one that came late: the others wait for it before it asks which step is next
        while (piece := loop.next()) is not None:
            if loop.is_over:
                return
            loop.hand_out()
            yield int(piece.span.positions(piece.begin, piece.end)[0])
            loop.comes_back()
    job.samples.note_place(loop.reading.loader, 0, 1.0)
