"""A ring between hosts, inside one process: what travels, and that all come to the same bits, whatever travels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.patience import PATIENCE
from tests.server.conftest import eventually
from tests.server.rings import WAYS, check_all_equal, check_ledger, copies, kill, push_cells, start
from tests.server.test_ring import Net, train

from syncline import Rule
from syncline.core.ring import Ballot
from syncline.core.wire.traffic import CommitStaged, Replicate, Stage
from syncline.errors import FrameError, ProtocolError, RuleError
from syncline.server import replicate
from syncline.server.backups import Backups, own_region
from syncline.server.ring import Voting
from syncline.testing import local_job

FLOATS, STEPS = 1 << 18, 2


def rank_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def between(jobs: Any) -> dict[int, list[int]]:
    """By process: bytes sent to others and received from them; what stays in one process is none."""
    found: dict[int, list[int]] = {}
    ends = {id(end): (end, names) for names, end in _ends(jobs)}
    for end, (one, two) in ends.values():
        stats = end.stats()
        for sender, receiver, count in ((one, two, stats.bytes_received), (two, one, stats.bytes_sent)):
            found.setdefault(sender, [0, 0])[0] += count
            found.setdefault(receiver, [0, 0])[1] += count
    return found


def _ends(jobs: Any) -> Any:
    for name, endpoints in jobs.process.endpoints.items():
        for end in endpoints:
            others = (name, end.peer.name)
            if "coordinator" not in others and rank_of(name) != rank_of(end.peer.name):
                yield (rank_of(end.peer.name), rank_of(name)), end


def travelled(workers: int, **settings: Any) -> float:
    """The most bytes that a process sends or receives in a step, in models."""
    counts: list[dict[int, list[int]]] = []
    with local_job(workers=workers, exchange="ring", slice_bytes=1 << 18, **settings) as jobs:

        def work(job: Any) -> Any:
            draw = np.random.default_rng(job.rank)
            job.kv.register({"w": np.zeros(FLOATS, np.float32)}, Rule("SGD", lr=0.1))
            for stage in range(2):
                job.barrier(f"before {stage}")
                if job.rank == 0:
                    counts.append(between(jobs))
                job.barrier(f"after {stage}")
                for _ in range(STEPS if stage == 0 else 0):
                    job.kv.push_pull({"w": draw.standard_normal(FLOATS).astype(np.float32)})
            return np.asarray(job.kv.pull(["w"])["w"]).copy()

        found = jobs.run(work)
        counts.append(between(jobs))
        check_all_equal(jobs)
    assert all(np.array_equal(one, found[0]) for one in found) and found[0].any()
    before, after, pulled = counts
    assert sum(map(sum, pulled.values())) - sum(map(sum, after.values())) < FLOATS, "pulls stay in their process"
    grown = [b - a for rank in before for a, b in zip(before[rank], after[rank], strict=True)]
    return max(grown) / STEPS / (4 * FLOATS)


@pytest.mark.parametrize(
    ("workers", "codec", "most"),
    [
        (2, "none", 1.0), (2, "bf16", 0.5), (2, "int8", 0.251), (2, "topk:0.01", 0.02),
        (3, "none", 4 / 3), (3, "bf16", 1.0), (3, "int8", 0.502), (3, "topk:0.01", 0.04),
    ],
)  # fmt: skip
def test_what_a_step_sends_over_sockets(workers: int, codec: str, most: float) -> None:
    """In models per process, each way: without a codec what an all-reduce has, 2 (N-1) / N. Where pushes are small
    enough all get all of them: (N-1) pushes. Parameters never travel."""
    assert travelled(workers, transport="tcp", codec=codec) <= most * 1.005 + 0.004


def test_what_a_step_sends_with_encoded_sums() -> None:
    """Four pushes in halves are more than a sum: that goes by its primary, and is encoded by --pull-codec."""
    plain = travelled(4, transport="tcp", codec="bf16")
    assert 1.12 < plain <= 0.75 * 1.5 + 0.01, "pushes up, a whole sum across"
    assert travelled(4, transport="tcp", codec="bf16", pull_codec="bf16") <= 0.75 + 0.01


@pytest.mark.parametrize("settings", [{}, {"codec": "int8"}, {"pull_codec": "bf16"}])
def test_hosts_with_several_workers(settings: dict[str, str]) -> None:
    """Some share memory, others do not: what lies in an arena is what others were sent."""
    assert travelled(3, on=["a", "a", "b"], **settings) <= 4 / 3 + 0.01


SLICES = {2: ["bf16", "int8", "topk:0.3"], 4: ["bf16"]}


@pytest.mark.parametrize(("workers", "codec"), [(n, codec) for n, found in SLICES.items() for codec in found])
def test_a_ring_with_a_codec_and_servers_with_it_come_to_the_same(workers: int, codec: str) -> None:
    """With two all is encoded in both; of four, what a worker gives its own server is not."""
    found = {}
    for exchange in ("servers", "ring"):
        with local_job(workers=workers, exchange=exchange, slice_bytes=512, transport="tcp", codec=codec) as jobs:
            found[exchange] = jobs.run(lambda job: train(job, "SGD", 0.5))
            if exchange == "ring":
                check_all_equal(jobs)
    close = {"rtol": 1e-5, "atol": 1e-6} if workers == 2 else {"rtol": 0.02, "atol": 0.01}
    for one, two in zip(found["servers"], found["ring"], strict=True):
        torch.testing.assert_close(one, two, **close)
        assert torch.equal(two, found["ring"][0]), "all ranks have the same, bit by bit"
    assert not torch.equal(found["ring"][0], torch.cat([p.detach().reshape(-1) for p in Net().parameters()]))


# -- deaths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "codec"), [(3, "topk:0.1"), (4, "bf16")])
def test_a_process_that_dies_costs_nobody_a_step(workers: int, codec: str) -> None:
    """With four a sum goes by its primary, with three all get all: what is made again goes another way."""
    with local_job(workers=workers, exchange="ring", slice_bytes=64, transport="tcp", codec=codec) as jobs:
        acknowledged: dict[str, int] = {}
        gone: set[str] = set()
        threads = start(jobs, lambda job: push_cells(job, 30, acknowledged), gone)
        eventually(lambda: acknowledged.get("worker-1", 0) >= 5)
        kill(jobs, 1, gone)
        left = [rank for rank in range(workers) if rank != 1]
        for rank in left:
            threads[rank].join(PATIENCE)
        counts = check_ledger(jobs[0], acknowledged)
        assert [counts[rank] for rank in left] == [30] * len(left)
        check_all_equal(jobs)


def test_one_that_comes_changes_the_way_that_slices_go() -> None:
    """Two give each other all pushes; three have sums made by primaries. Nobody goes by what was before."""
    with local_job(workers=2, exchange="ring", slice_bytes=64, transport="tcp", most_workers=3) as jobs:
        acknowledged: dict[str, int] = {}

        def work(job: Any) -> None:
            push_cells(job, 40 if job.name != "worker-2" else 5, acknowledged)
            job.barrier("all")

        first = start(jobs, work, set())
        eventually(lambda: acknowledged.get("worker-0", 0) >= 3)
        assert all(server.staging.copies.slots() for server in jobs.servers.values())
        late = jobs.add_worker("worker-2")
        for thread in [*first, *start([late], work, set())]:
            thread.join(PATIENCE)
        assert check_ledger(late, acknowledged)[:3] == [40, 40, 5]
        eventually(lambda: "server-2" in jobs.servers["server-0"].ring.voting.votes.voters)
        assert not any(server.staging.copies.slots() for server in jobs.servers.values())
        check_all_equal(jobs)


@pytest.mark.parametrize("at", ["nobody has voted", "one has not summed up"])
def test_a_round_made_anew_with_a_codec_is_the_same_bytes(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """All that was pushed is in the parameters or in the residuals, each of it once. Held by all survivors, the round
    counts, with what the dead one brought; where one has not summed it up, it is made again by those who are
    there. Only rounds of the generation before the death are stopped: the death may be over before the test knows."""
    stopped = set[int]()  # generations
    vote, keep, late = Voting.held, Voting.keeps, list[Callable[[], bool]]()

    def held(self: Any, work: Any) -> None:
        if not (self.generation in stopped and at == "nobody has voted"):
            vote(self, work)

    def keeps(self: Any, work: Any, take: Any) -> bool:
        if self.generation in stopped and at == "one has not summed up" and self._name == "server-0":
            late.append(lambda: keep(self, work, take))
            return False
        return keep(self, work, take)

    monkeypatch.setattr(Voting, "held", held)
    monkeypatch.setattr(Voting, "keeps", keeps)
    pushes = {rank: np.random.default_rng(rank).integers(-9, 9, (4, 64)).astype(np.float32) for rank in range(3)}
    with local_job(workers=3, exchange="ring", slice_bytes=64, transport="tcp", codec="topk:0.2") as jobs:
        gone: set[str] = set()
        passed, go = threading.Barrier(4), threading.Event()

        def work(job: Any) -> None:
            rank, zeros = rank_of(job.name), np.zeros(64, np.float32)
            job.kv.register({"left": zeros, "dead": zeros}, Rule("Add"), reduce="sum")
            for number in range(4):
                if number == 3:
                    passed.wait(PATIENCE)
                    go.wait(PATIENCE)
                job.kv.push({"left" if rank < 2 else "dead": pushes[rank][number]}).wait()

        threads = start(jobs, work, gone)
        passed.wait(PATIENCE)
        dead = np.asarray(jobs[0].kv.pull(["dead"])["dead"]).copy()
        servers = jobs.servers
        stopped.update(server.ring.voting.generation for server in servers.values())
        go.set()
        wanted = {"server-0", "server-1", "server-2"} if at == "nobody has voted" else {"server-1"}
        eventually(lambda: all(b.held for name in wanted for b in servers[name].hosting.backups.backups.values()))
        kill(jobs, 2, gone)
        for thread in threads[:2]:
            thread.join(PATIENCE)
        found = {name: np.asarray(value) for name, value in jobs[0].kv.pull(["left", "dead"]).items()}
        kept = [jobs[rank].exchange.encoder.take().get("left", 0) for rank in range(2)]
        assert np.any(kept[0])
        assert np.array_equal(found["left"] + kept[0] + kept[1], pushes[0].sum(0) + pushes[1].sum(0))
        assert np.array_equal(found["dead"], dead) == (at != "nobody has voted")
        assert not any(sum_up() for sum_up in late), "a sum that comes too late is for nothing"
        assert not any(b.held for server in servers.values() for b in server.hosting.backups.backups.values())
        assert bool(late) == (at != "nobody has voted")
        check_all_equal(jobs)


# -- who says what is not so ------------------------------------------------------------------------------


def test_a_commit_needs_the_bytes_of_spread_slices_everywhere() -> None:
    """Whoever is not the primary would sum up what it does not have."""
    with local_job(workers=2, exchange="ring", slice_bytes=64, transport="tcp") as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(64, np.float32)}, Rule("Add")))
        server = jobs.servers["server-1"]
        mine = sorted(server.slices)
        assert mine and server.hosting.backups.numbers() == server.staging.copies.numbers - set(mine)
        endpoint = jobs[0].exchange.routes.endpoints["server-1"]
        stage = Stage(1, 1, 0, ((0, 1),), 1.0, False, None, [], mine, None, False, [])
        views = [memoryview(bytes(64))] * len(mine)
        endpoint.call(stage, buffers=views, payload_bytes=64 * len(mine)).wait(PATIENCE)
        with pytest.raises(ProtocolError, match="has not staged"):
            endpoint.call(CommitStaged(1, [])).wait(PATIENCE)


def test_a_server_that_lies_about_a_sum_is_closed() -> None:
    with local_job(workers=3, exchange="ring", slice_bytes=64, transport="tcp", pull_codec="bf16") as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(48, np.float32)}, Rule("Add")))
        server = jobs.servers["server-1"]
        backups: Backups = server.hosting.backups
        number, backup = next(iter(sorted(backups.backups.items())))
        ballot = Ballot(server.ring.voting.votes.generation, "worker-0", 1, 1)

        def lie(codec: str, sizes: list[int]) -> Replicate:
            return Replicate(number, 0, [], [], [0], [], 1.0, ballot=ballot, codec=codec, sizes=sizes)

        peer = type("P", (), {"name": backup.primary})()
        for codec, sizes in (("int8", [32]), ("bf16", [33]), ("bf16", [1 << 40]), ("bf16", [32, 32]), ("bf16", [])):
            with pytest.raises(FrameError):
                backups.buffers_for(peer, lie(codec, sizes))
        assert [len(b) for b in backups.buffers_for(peer, lie("bf16", [32]))] == [32]
        primary = jobs.servers[backup.primary]
        partner = primary.hosting.partner(jobs.coordinator.membership.state.members["server-1"])
        endpoint = partner.connect()
        endpoint.call(lie("bf16", [31]), buffers=[memoryview(bytes(31))], payload_bytes=31)
        eventually(lambda: not endpoint.is_open)
        assert backup.held is None


def test_a_sum_that_cannot_be_made_is_said_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec of the user's own raises, for one slice of several: its server never votes, and nobody waits for it."""
    original = replicate.encode_sum

    def encode(coder: Any, segment: Any, part: Any, has: Any, data: Any) -> Any:
        if part.id == 1:
            raise ZeroDivisionError("an odd block")
        return original(coder, segment, part, has, data)

    monkeypatch.setattr(replicate, "encode_sum", encode)
    errors = list[str]()

    def work(job: Any) -> None:
        job.kv.register({"x": np.zeros(96, np.float32)}, Rule("Add"))
        try:
            job.kv.push({"x": np.ones(96, np.float32)}).wait()
        except RuleError as error:
            errors.append(str(error))

    with local_job(workers=3, exchange="ring", slice_bytes=64, transport="tcp", pull_codec="bf16") as jobs:
        jobs.run(work)
    assert len(errors) == 3 and all("an odd block" in text for text in errors)


def test_a_sum_that_comes_late_is_not_written_over_one_of_a_later_round() -> None:
    """A primary's bytes are on their way, slowly, when a third process dies. After that the slice is spread, and this
    server sums it up itself, where those bytes would have been put."""
    with local_job(workers=3, exchange="ring", slice_bytes=64, transport="tcp") as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(96, np.float32)}, Rule("Add"), reduce="sum"))
        server = jobs.servers["server-1"]
        backups, voting = server.hosting.backups, server.ring.voting
        number, backup = next((n, b) for n, b in sorted(backups.backups.items()) if b.primary == "server-0")
        assert number not in server.staging.copies.numbers, "by its primary"
        late = Replicate(number, 0, [], [], [0], [], 1.0, ballot=Ballot(voting.votes.generation, "worker-0", 1, 1))
        peer = type("P", (), {"name": "server-0"})()
        (reading,) = backups.buffers_for(peer, late)
        assert np.shares_memory(np.frombuffer(reading, np.uint8), own_region(backup, backup.slot).array)
        kill(jobs, 2, set())
        eventually(lambda: voting.votes.voters == {"server-0", "server-1"})
        eventually(lambda: number in server.staging.copies.numbers)
        assert backups.backups[number] is backup
        mine = own_region(backup, backup.slot).array
        (again,) = backups.buffers_for(peer, late)
        for view in (reading, again):
            view[:] = bytes([255]) * len(view)
        assert not mine.any()


def test_a_copy_that_is_being_written_is_not_taken_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reads its own server's memory while a round of others is applied to it."""
    still: list[bool] = []
    with local_job(workers=2, exchange="ring", slice_bytes=64, **WAYS["by host leaders"]) as jobs:
        jobs.run(lambda job: job.kv.register({"x": np.zeros(64, np.float32)}, Rule("Add")))
        for name, slots in copies(jobs).items():
            for number in jobs.servers[name].hosting.backups.numbers():
                slot = slots[number]
                apply = slot.rules.apply

                def look(*given: Any, slot: Any = slot, apply: Any = apply) -> None:
                    still.append(slot.state.is_still(slot.state.version))
                    apply(*given)

                monkeypatch.setattr(slot.rules, "apply", look)
        jobs.run(lambda job: job.kv.push({"x": np.ones(64, np.float32)}).wait())
        assert still and not any(still)
        assert all(slot.state.is_still(1) for slots in copies(jobs).values() for slot in slots.values())
