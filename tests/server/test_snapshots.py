"""The cut through a whole job, while its workers push: what is saved is, on every server, the same commits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE

from syncline import Rule
from syncline.core.layout import Layout
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Peer
from syncline.server.snapshot_barrier import SnapshotBarrierService
from syncline.testing import local_job

from .snapshots import WAIT, save, saved_values


@pytest.fixture
def tell_of() -> Iterator[Callable[[Any], Callable[[str, Any], Any]]]:
    made: list[Endpoint] = []

    def tell_in(jobs: Any) -> Callable[[str, Any], Any]:
        process, ways = jobs.process, {}

        def tell(server: str, message: Any) -> Any:
            if server not in ways:
                me, there = Peer("coordinator", "coordinator", 0), Peer("server", server, 0)
                ways[server] = Endpoint(process.pair(me, there, process.servers[server]), Stamp("in-process"))
                made.append(ways[server])
            return ways[server].call(message)

        return tell

    yield tell_in
    for endpoint in made:
        endpoint.close()


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        pytest.param("sync", {}, id="sync"),
        pytest.param("bounded:1", {}, id="bounded", marks=pytest.mark.proof),
        pytest.param("async", {}, id="async", marks=pytest.mark.proof),
        pytest.param("async", {"window": 2}, id="window"),
        pytest.param("sync:spare=1", {}, id="spare"),
    ],
)
def test_the_cut_is_consistent_while_workers_push_all_the_time(
    policy: str, settings: dict[str, Any], tmp_path: Any, tell_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A one-hot ledger on three servers: what is saved is, for every worker, its first commits and no others; as many
    as the cut says; the same on every server. The first cut is made before the hundredth push, the last one behind
    all of them, however slow any of that is; the others somewhere between."""
    monkeypatch.setitem(SnapshotBarrierService.__init__.__kwdefaults__, "barrier_seconds", PATIENCE)
    pushes, servers = 150, [f"server-{k}" for k in range(3)]
    with local_job(workers=3, servers=3, policy=policy, slice_bytes=64, **settings) as jobs:
        cuts: list[Any] = []
        begun, first_cut, last_cut, failed = threading.Event(), threading.Event(), threading.Event(), []
        through = threading.Semaphore(0)

        def work(job: Any) -> None:
            zeros = np.zeros((3, pushes), np.float32)
            job.kv.register({"ledger": zeros, "count": np.zeros(96, np.float32)}, Rule("Add"), reduce="sum")
            tickets = []
            for number in range(pushes):
                if number == 100:
                    assert first_cut.wait(WAIT)
                cell = zeros.copy()
                cell[job.rank, number] = 1.0
                count = np.zeros(96, np.float32)
                count[job.rank :: 3] = 1.0
                tickets.append(job.kv.push({"ledger": cell, "count": count}))
                if number == 3:
                    begun.set()
            for ticket in tickets:
                ticket.wait()
            job.barrier("all in")
            through.release()
            assert last_cut.wait(WAIT)

        def cut() -> None:
            try:
                assert begun.wait(WAIT)
                layout = Layout(jobs.servers["server-0"].hosting.segments.values())
                tell = tell_of(jobs)
                for number in range(1, 7):
                    assert number < 6 or all(through.acquire(timeout=WAIT) for _ in range(3))
                    cuts.append(save(tell, servers, layout, tmp_path, number))
                    first_cut.set()
            except BaseException as error:
                failed.append(error)
            finally:
                first_cut.set()
                last_cut.set()

        thread = threading.Thread(target=cut)
        thread.start()
        jobs.run(work)
        thread.join(PATIENCE)
        assert not failed, failed
    is_late = "spare" in policy
    for folder, manifest, _, clocks in cuts:
        found = saved_values(folder, manifest)
        by_rank = {int(name.rpartition("-")[2]): clock for (name, _), clock in clocks.items()}
        for rank in range(3):
            clock, count = by_rank.get(rank, 0), found["count"][rank::3]
            assert (count == count[0]).all(), "the same on every server"
            if not is_late:  # there, some of them are void
                assert (found["ledger"][rank] == (np.arange(pushes) < clock)).all()
                assert count[0] == clock
            else:
                assert found["ledger"][rank].sum() == count[0] <= clock
    assert len({tuple(sorted(clocks.items())) for *_, clocks in cuts}) > 1, "they were made while it ran"
