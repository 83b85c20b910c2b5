"""What a commit does next follows from the servers' answers, whoever reads them; and nobody reads them too late."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.worker.wires import go_between_processes

from syncline import Rule
from syncline.testing import local_job
from syncline.worker.job import Job

SGD = Rule("SGD", lr=1.0)


@pytest.fixture(autouse=True)
def whoever_waits_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    broken: list[Exception] = []
    go_between_processes(monkeypatch.setattr, broken.append, shares=True)
    yield
    assert not broken, broken


def test_hundreds_of_slices_are_uploaded_over_a_unix_socket() -> None:
    """Answers that nobody reads yet must not fill the socket: server and worker would wait for each other."""
    with local_job(1, slice_bytes=1024, wait_seconds=PATIENCE) as local:

        def work(job: Job) -> bool:
            job.kv.register({"w": np.zeros(500 * 256, np.float32)}, SGD)
            out = job.kv.push_pull({"w": np.ones(500 * 256, np.float32)}).wait()
            assert len(list(job.exchange.layout.slices())) == 500
            return bool((out["w"] == -1).all())

        assert local.run(work) == [True]


def test_a_push_counts_although_its_worker_does_not_wait_for_it() -> None:
    """With two servers the commit follows the acknowledgements: the other worker must not wait for this script."""
    applied = threading.Event()
    with local_job(2, servers=2, slice_bytes=1024, wait_seconds=PATIENCE) as local:

        def work(job: Job) -> bool:
            job.kv.register({"w": np.zeros(1000, np.float32)}, SGD)
            job.barrier("registered")
            ticket = job.kv.push({"w": np.ones(1000, np.float32)})
            if job.rank == 1:
                ticket.wait()
                applied.set()
            seen = applied.wait(PATIENCE)
            ticket.wait()
            return seen

        assert local.run(work, 2 * PATIENCE) == [True, True]
