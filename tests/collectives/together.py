"""All workers of a job in one process call something at the same time; errors are results too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.patience import PATIENCE

from syncline.testing.local import LocalJob
from syncline.worker.current import current_in_thread
from syncline.worker.job import Job

SECONDS = PATIENCE


def together(job: LocalJob, *functions: Callable[[Job], Any], ranks: list[int] | None = None) -> list[Any]:
    """What each rank's function returned or raised; one function is for all."""
    chosen = ranks if ranks is not None else list(range(len(job)))
    found: dict[int, Any] = {}

    def work(rank: int, function: Callable[[Job], Any]) -> None:
        try:
            with current_in_thread(job[rank]):
                found[rank] = function(job[rank])
        except Exception as error:
            found[rank] = error

    threads = [
        threading.Thread(target=work, args=(rank, functions[k % len(functions)]), daemon=True)
        for k, rank in enumerate(chosen)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    stuck = [rank for rank, thread in zip(chosen, threads, strict=True) if thread.is_alive()]
    assert not stuck, f"ranks {stuck} hang"
    return [found[rank] for rank in chosen]


def waits(job: Job) -> bool:
    """Whether this worker's script is in a call now, and waits in it for others."""
    return job.debug_state().waits_for != ""


def messages(results: list[Any]) -> list[str]:
    """The error of each rank, in words."""
    assert all(isinstance(result, Exception) for result in results), results
    return [f"{type(result).__name__}: {result}" for result in results]
