"""What servers of a ring of hosts say to each other about sums: lost, twice, too early, or not so."""

from __future__ import annotations

from typing import Any

import pytest
from tests.patience import PATIENCE
from tests.server.conftest import eventually
from tests.server.rings import check_all_equal, check_ledger, push_cells, start
from tests.server.test_host_leaders import AABB, host_reducer_of, ring

from syncline.core.wire.message import Done
from syncline.core.wire.traffic import HostSum, ShareSums, WholeSum
from syncline.errors import ProtocolError
from syncline.net.memory import HeapMemory
from syncline.net.rpc import Request
from syncline.reduce.hierarchical import HierarchicalReducer


def test_a_sum_is_not_written_over_while_a_neighbour_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that has not said that it has applied the last round keeps the next one from being added up."""
    late: list[Any] = []
    original = HierarchicalReducer.release

    def release(self: HierarchicalReducer, complete: Any) -> None:
        active = self.host_round.active
        if self.host_round.name == "server-1" and active is not None and not late:
            late.extend(active.unanswered)
            assert late, "it reads the memory that server-0 shares"
            active.unanswered = []
        original(self, complete)

    monkeypatch.setattr(HierarchicalReducer, "release", release)
    with ring(["a", "a", "b"], slice_bytes=512) as jobs:
        acknowledged: dict[str, int] = {}
        threads = start(jobs, lambda job: push_cells(job, 2, acknowledged), set())
        eventually(lambda: len(acknowledged) == 3)
        places = host_reducer_of(jobs, "server-0").host_round.setup.memories
        eventually(lambda: any(place.waiting for place in places.values()))
        assert set(acknowledged.values()) == {1}
        waits = jobs.servers["server-0"].beat
        eventually(lambda: {name for wait in waits().waits for name in wait.for_whom} == {"server-1"})
        for request in late:
            request.reply(Done())
        for thread in threads:
            thread.join(PATIENCE)
        assert check_ledger(jobs[0], acknowledged) == [2, 2, 2, 0]
        check_all_equal(jobs)


@pytest.mark.parametrize("kind", [HostSum, WholeSum])
def test_what_a_broken_connection_has_lost_is_said_again(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Before it came, and after: then the answer is lost, and what comes twice counts once."""
    counts = {"before": 0, "after": 0}
    hear = HierarchicalReducer.receive

    def lose(self: HierarchicalReducer, request: Any, message: Any) -> None:
        when = "before" if counts["before"] < 3 else "after" if counts["after"] < 3 else ""
        if isinstance(message, kind) and request.endpoint.is_open and when:
            counts[when] += 1
            if when == "after":
                hear(self, request, message)
            request.endpoint.close("a cable was pulled")
            return
        hear(self, request, message)

    monkeypatch.setattr(HierarchicalReducer, "receive", lose)
    with ring(["a", "a", "b"], slice_bytes=512) as jobs:
        acknowledged: dict[str, int] = {}
        jobs.run(lambda job: (push_cells(job, 6, acknowledged), job.barrier("all")))
        assert counts == {"before": 3, "after": 3}
        assert check_ledger(jobs[0], acknowledged) == [6, 6, 6, 0]
        check_all_equal(jobs)


def test_what_comes_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer was lost, and its round is not through yet."""
    hear = HierarchicalReducer.receive

    def twice(self: HierarchicalReducer, request: Any, message: Any) -> None:
        hear(self, request, message)
        hear(self, Request(request.endpoint, 0, message, list(request.payload), None), message)

    monkeypatch.setattr(HierarchicalReducer, "receive", twice)
    with ring(["a", "a", "b", "c"], slice_bytes=256) as jobs:
        acknowledged: dict[str, int] = {}
        jobs.run(lambda job: (push_cells(job, 4, acknowledged), job.barrier("all")))
        assert check_ledger(jobs[0], acknowledged) == [4, 4, 4, 4]
        check_all_equal(jobs)


def test_who_gives_sums_that_are_not_its_own_is_refused() -> None:
    with ring(AABB, slice_bytes=512) as jobs:
        jobs.run(lambda job: push_cells(job, 1, {}))
        server = jobs.servers["server-0"]
        host_reducers, reducer = server.ring.host_reducers, host_reducer_of(jobs, "server-0")
        known = (reducer.generation, 99)
        mine = next(iter(server.slices))
        theirs = next(n for n, b in server.hosting.backups.backups.items() if b.primary == "server-1")
        carrier = reducer.host_leaders.of(mine)["b"]
        other = next(name for name in ("server-2", "server-3") if name != carrier)

        def buffers_for(name: str, message: Any) -> list[int]:
            peer = type("P", (), {"name": name, "role": "server", "__str__": lambda self: self.name})()
            return [len(buffer) for buffer in host_reducers.buffers_for(peer, message)]

        assert buffers_for(carrier, HostSum(*known, mine)) == [512]
        assert buffers_for("server-1", WholeSum(*known, theirs)) == [512]
        for name, message in (
            (other, HostSum(*known, mine)), ("server-1", HostSum(*known, mine)), (carrier, HostSum(*known, theirs)),
            (carrier, WholeSum(*known, theirs)), ("server-1", WholeSum(*known, mine)),
            (carrier, HostSum(*known, 1 << 20)), ("server-1", WholeSum(99, 0, 1 << 20)),
        ):  # fmt: skip
            with pytest.raises(ProtocolError):
                buffers_for(name, message)
        with pytest.raises(ProtocolError, match="only servers"):
            server.ring.host_reducers and server.buffers_for(
                type("P", (), {"name": "worker-1", "role": "worker"})(), HostSum(*known, mine), 512
            )


def test_sums_without_their_bytes_and_of_rounds_that_nobody_knows_are_refused() -> None:
    with ring(["a", "a", "b"], slice_bytes=512) as jobs:
        jobs.run(lambda job: push_cells(job, 1, {}))
        server, reducer = jobs.servers["server-0"], host_reducer_of(jobs, "server-0")
        known, mine = (reducer.generation, 99), next(iter(server.slices))
        members = jobs.coordinator.membership.state.members
        far, near = (
            jobs.servers[name].hosting.partner(members["server-0"]).connect() for name in ("server-2", "server-1")
        )
        theirs = next(n for n, b in server.hosting.backups.backups.items() if b.primary == "server-1")
        with pytest.raises(ProtocolError, match="without its bytes"):
            far.call(HostSum(*known, mine)).wait(PATIENCE)
        server.ring.host_reducers.shared[reducer.generation]["server-1"].pop(theirs)
        with pytest.raises(ProtocolError, match="without its bytes"):
            near.call(WholeSum(*known, theirs)).wait(PATIENCE)
        reducer.most_kept, size = 2, server.slices[mine].part.num_bytes
        for number in range(99, 102):
            message = HostSum(reducer.generation, number, mine)
            call = far.call(message, buffers=[memoryview(bytes(size))], payload_bytes=size)
            assert call.is_done == (number == 101), "two wait for their rounds"
        with pytest.raises(ProtocolError, match="unknown"):
            call.wait(PATIENCE)
        assert len(reducer.kept) == 2
        far.call(message, buffers=[memoryview(bytes(size - 1))], payload_bytes=size - 1)
        eventually(lambda: not far.is_open)  # a size that cannot be


def test_what_comes_before_its_generation_waits_for_it() -> None:
    with ring(["a", "a", "b"], slice_bytes=512) as jobs:
        jobs.run(lambda job: push_cells(job, 1, {}))
        server = jobs.servers["server-0"]
        host_reducers, before, mine = (
            server.ring.host_reducers,
            host_reducer_of(jobs, "server-0"),
            next(iter(server.slices)),
        )
        member = jobs.coordinator.membership.state.members["server-0"]
        endpoint = jobs.servers["server-2"].hosting.partner(member).connect()
        calls, size = [], server.slices[mine].part.num_bytes
        for generation in (before.generation - 1, before.generation + 1, before.generation + 2):
            message, bytes_ = HostSum(generation, 9, mine), memoryview(bytes(size))
            calls.append(endpoint.call(message, buffers=[bytes_], payload_bytes=size))
        assert [call.is_done for call in calls] == [True, False, False] and len(host_reducers.early) == 2
        with server.commits.state_lock:
            begun = host_reducers.begin(before.generation + 1, before.names)
        assert begun is not None and [key.round for key in begun.kept] == [9]
        assert [generation for generation, _ in host_reducers.early] == [before.generation + 2]
        begun.close()
        eventually(lambda: calls[1].is_done)


@pytest.mark.parametrize("places", [[(0, -64)], [(0, 4000)], [(1 << 20, 0)]])
def test_who_lends_what_cannot_be_is_refused(places: list[tuple[int, int]]) -> None:
    with ring(["a", "a", "b"], slice_bytes=512) as jobs:
        jobs.run(lambda job: push_cells(job, 1, {}))
        first, second = (jobs.servers[f"server-{rank}"] for rank in range(2))
        member = jobs.coordinator.membership.state.members["server-1"]
        endpoint = first.hosting.partner(member).connect()
        generation = host_reducer_of(jobs, "server-0").generation
        with pytest.raises(ProtocolError):
            endpoint.call(ShareSums(generation + 1, 4096, places), attachment=HeapMemory(4096)).wait(PATIENCE)
        with pytest.raises(ProtocolError, match="did not arrive"):
            endpoint.call(ShareSums(generation + 1, 4096, [])).wait(PATIENCE)
        assert generation + 1 not in second.ring.host_reducers.shared
