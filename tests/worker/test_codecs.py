"""Codecs in whole jobs: bytes on the wire, what is exempt, who lies, codecs of the user's own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.pushing import SGD, SIZE, floats, push, register, residual_of

from syncline import extensions
from syncline.core.codecs.pieces import NOT_SENT
from syncline.core.rule import Rule
from syncline.core.wire.traffic import Committed, Stage
from syncline.errors import ConfigError, ConnectionLost, FrameError, SynclineError
from syncline.net.rpc import Endpoint
from syncline.net.transport import buffer_of
from syncline.testing import local_job
from syncline.worker.job import Job


@pytest.mark.parametrize(("codec", "ratio"), [("bf16", 0.51), ("fp16", 0.51), ("int8", 0.27), ("topk:0.01", 0.03)])
def test_pushes_take_so_many_bytes_of_the_wire(codec: str, ratio: float) -> None:
    """All that goes over the connections counts, headers and messages too."""

    def sent(**settings: Any) -> int:
        with local_job(workers=1, servers=2, transport="tcp", slice_bytes=1 << 18, **settings) as jobs:
            register(jobs[0], 300_000)
            before = jobs[0].exchange.stats().bytes_sent
            grads = np.random.default_rng(0).standard_normal(300_000).astype(np.float32)
            for _ in range(3):
                jobs[0].kv.push({"x": grads}).wait()
            return jobs[0].exchange.stats().bytes_sent - before

    assert sent(codec=codec) <= ratio * sent()


@pytest.mark.parametrize(("codec", "ratio"), [("bf16", 0.51), ("int8", 0.27)])
@pytest.mark.parametrize(("policy", "window"), [("sync", 0), ("async", 0), ("async", 1), ("sync:spare=1", 0)])
def test_what_comes_down_is_rounded_and_pulls_are_exact(codec: str, ratio: float, policy: str, window: int) -> None:
    """Two workers, as spare ones need; with a window what has come waits beside its place."""
    with local_job(
        workers=2, servers=2, transport="tcp", pull_codec=codec, policy=policy, window=window, slice_bytes=1 << 14
    ) as jobs:

        def work(job: Job) -> tuple[Any, Any, int]:
            register(job)
            job.barrier("there")
            out = {"x": np.zeros(SIZE, np.float32)}
            grads = np.random.default_rng(job.rank).standard_normal(SIZE).astype(np.float32)
            if job.rank:
                job.rest()
                job.barrier("pushed")
                return None, None, 0
            before = job.exchange.stats().bytes_received
            job.kv.push_pull({"x": grads}, out).wait()
            taken = job.exchange.stats().bytes_received - before
            job.barrier("pushed")
            return out["x"], job.kv.pull()["x"], taken

        rounded, exact, taken = jobs.run(work)[0]
    expected = -np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    np.testing.assert_array_equal(exact, expected)
    assert not np.array_equal(rounded, exact)
    np.testing.assert_allclose(rounded, exact, atol=0.02)
    assert taken <= ratio * 4 * SIZE + 1000


def test_without_a_codec_every_bit_is_as_ever_and_in_shared_memory_too(capfd: pytest.CaptureFixture[str]) -> None:
    grads = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    found = []
    for settings in ({"transport": "tcp"}, {"transport": "tcp", "codec": "none"}, {"codec": "int8"}):
        with local_job(workers=1, **settings) as jobs:
            register(jobs[0])
            found.append(push(jobs[0], x=grads)["x"])
    assert np.array_equal(found[0], -grads) and np.array_equal(found[1], -grads) and np.array_equal(found[2], -grads)
    said = capfd.readouterr()
    told = [line for line in (said.out + said.err).splitlines() if "encoded" in line]
    line = "syncline: worker-0: --codec int8: this worker shares memory with its servers: nothing is encoded there"
    assert told == [line]


def test_what_is_exempt_or_no_float32_or_assigned_goes_as_it_is() -> None:
    size = 3000
    rng = np.random.default_rng(1)
    with local_job(workers=1, transport="tcp", codec="topk:0.01", codec_exempt="*.bias, norm*") as jobs:
        job, rules = jobs[0], {}
        names = ("w", "a.bias", "norm.w", "double", "buffer")
        dtypes = {name: np.float64 if name == "double" else np.float32 for name in names}
        rules = {name: Rule("Assign") if name == "buffer" else SGD for name in names}
        job.kv.register({name: np.zeros(size, dtypes[name]) for name in names}, rules)
        grads = {name: rng.standard_normal(size).astype(dtypes[name]) for name in names}
        found = push(job, **grads)
    assert np.count_nonzero(found["w"]) == 30
    np.testing.assert_array_equal(found["buffer"], grads["buffer"])
    for name in ("a.bias", "norm.w", "double"):
        np.testing.assert_array_equal(found[name], -grads[name])


# -- who lies ------------------------------------------------------------------------------------------------


def stage_of(job: Job, codec: str, sizes: list[list[int]]) -> Stage:
    return Stage(
        clock=1, phase=0, slot=0, pushed=((0, 1),), weight=1.0, skip=False, clip_norm=None, overrides=[],
        slices=[0], back_at=None, commit=True, pull=[], num_segments=1, codec=codec, sizes=sizes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "sizes", "payload", "message"),
    [
        ("zip", [[8]], b"12345678", "worker-0.* encodes by 'zip'; the codec of this job: topk:0.25"),
        ("topk:0.25", [[1 << 40]], b"12345678", "bytes of topk:0.25 for 'x' in slice 0; at most 16"),
        ("topk:0.25", [[-7]], b"12345678", "-7 bytes of topk:0.25"),
        ("topk:0.25", [[8, 8]], b"1234567812345678", "2 units of slice 0, which has 1"),
        ("topk:0.25", [[8], [8]], b"12345678", "sizes of 2 slices, and 1 slices"),
        ("topk:0.25", [[8]], b"123456781", "a payload of 9 bytes does not fit"),
        ("topk:0.25", [[8]], b"", "announces encoded slices whose bytes did not come"),
        ("topk:0.25", [[8]], b"\xff" * 8, "places out of order, or beyond 8 numbers"),
        ("topk:0.25", [[7]], b"1234567", "7 bytes of topk:0.25 for 8 numbers"),
    ],
)
def test_a_worker_that_lies_is_closed(codec: str, sizes: Any, payload: bytes, message: str) -> None:
    with local_job(workers=1, transport="tcp", codec="topk:0.25") as jobs:
        register(jobs[0], 8)
        endpoint = jobs[0].exchange.routes.endpoints["server-0"]
        call = endpoint.call(
            stage_of(jobs[0], codec, sizes), buffers=[memoryview(payload)], payload_bytes=len(payload)
        )
        with pytest.raises(ConnectionLost, match=message):
            call.wait(PATIENCE)
        assert not endpoint.is_open


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer: {"codec": "int8"}, "an answer encoded by 'int8', which was not asked for"),
        (lambda answer: {"sizes": []}, "sizes of 0 slices, and 1 slices"),
        (lambda answer: {"sizes": [[1 << 50]]}, "bytes of bf16 for 'x'"),
        (lambda answer: {"sizes": [[NOT_SENT, 1]]}, "2 units of slice 0"),
    ],
)
def test_a_server_that_lies_is_closed(
    change: Callable[[Committed], dict[str, Any]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Endpoint.send
    reasons = []
    closed = Endpoint.lost

    def lie(endpoint: Any, number: int, flags: int, answer: Any, *rest: Any) -> None:
        if isinstance(answer, Committed) and answer.codec:
            answer = msgspec.structs.replace(answer, **change(answer))
        send(endpoint, number, flags, answer, *rest)

    def noted(endpoint: Any, reason: str) -> None:
        reasons.append(reason)
        closed(endpoint, reason)

    with local_job(workers=1, transport="tcp", pull_codec="bf16") as jobs:
        register(jobs[0], 8)
        jobs[0].exchange.wait_seconds = 0.2
        monkeypatch.setattr(Endpoint, "send", lie)
        monkeypatch.setattr(Endpoint, "lost", noted)
        with pytest.raises(Exception):  # noqa: B017 - whatever the job makes of a server that is cut off
            push(jobs[0], x=floats(1))
        monkeypatch.undo()
    assert any(message in reason for reason in reasons), reasons


def test_a_slice_that_is_announced_and_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Endpoint.send

    def lie(endpoint: Any, number: int, flags: int, answer: Any, buffers: Any, size: int, attachment: Any) -> None:
        if isinstance(answer, Committed) and answer.codec:
            buffers, size = [], 0
        send(endpoint, number, flags, answer, buffers, size, attachment)

    with local_job(workers=1, transport="tcp", pull_codec="bf16") as jobs:
        register(jobs[0], 8)
        monkeypatch.setattr(Endpoint, "send", lie)
        with pytest.raises(FrameError, match="slice 0 is announced, and did not come"):
            push(jobs[0], x=floats(1))
        monkeypatch.undo()


# -- codecs of the user's own --------------------------------------------------------------------------------


class Sign:
    """As docs/guides/codecs.md has it."""

    name, is_lossy = "sign", True

    def bound(self, num_items: int) -> int:
        return 4 + -(-num_items // 8)

    def encode(self, values: Any) -> Any:
        size = np.abs(values).mean(dtype=np.float32) if values.size else np.float32(0)
        return np.concatenate([np.array([size]).view(np.uint8), np.packbits(values > 0)])

    def decode(self, data: Any, out: Any) -> None:
        if data.size != self.bound(out.size):
            raise ValueError("cut short")
        out[:] = np.where(np.unpackbits(data[4:], count=out.size), 1, -1) * data[:4].view(np.float32)


sign = Sign()


def test_one_of_the_users_own_is_imported_by_name() -> None:
    with local_job(workers=1, transport="tcp", codec=f"{__name__}:sign") as jobs:
        register(jobs[0], 8)
        found = push(jobs[0], x=floats(3, -1))["x"]
        np.testing.assert_array_equal(found, floats(-2, 2))
        np.testing.assert_array_equal(residual_of(jobs[0]), floats(1, 1))
    with pytest.raises(ConfigError, match=r"no\.such:codec: ModuleNotFoundError.*servers need it as workers do"):
        extensions.load("no.such:codec")
    with pytest.raises(ConfigError, match="AttributeError"):
        extensions.load(f"{__name__}:nothing")


class Faulty(Sign):
    """Does one thing that a codec must not, where there are many numbers."""

    def __init__(self, fault: str) -> None:
        self.name, self.fault = fault, fault

    def encode(self, values: Any) -> Any:
        if self.fault == "raises" and values.size > 4:
            raise ZeroDivisionError("by zero")
        found = super().encode(values)
        if values.size <= 4:
            return found
        return {"longer": np.append(found, found[:1]), "wider": found.astype(np.int64), "unreadable": found[:-1]}.get(
            self.fault, found
        )


longer, wider, unreadable, raises = (Faulty(fault) for fault in ("longer", "wider", "unreadable", "raises"))
FAULTS = {
    "longer": "the codec longer failed at 8 numbers of 'x': 6 bytes; its own bound\\(8\\) is 5",
    "wider": "the codec wider failed at 8 numbers of 'x': an encoding is .* uint8, and this is 1-dimensional int64",
    "unreadable": "no encoding by unreadable: ValueError: cut short",
    "raises": "the codec raises failed at 8 numbers of 'x': ZeroDivisionError: by zero",
}


@pytest.mark.parametrize(
    "settings",
    [{"servers": 2}, {"policy": "async", "window": 2}, {"exchange": "ring"}],
    ids=["sync", "async", "ring"],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_codec_that_breaks_its_word_is_told_where_it_encodes_and_holds_up_nobody(
    fault: str, settings: dict[str, Any]
) -> None:
    """The worker's own error names it, at this push and at the next; it leaves, and the other one goes on."""
    with local_job(workers=2, transport="tcp", codec=f"{__name__}:{fault}", **settings) as jobs:
        faulty, other = jobs
        jobs.run(lambda job: job.kv.register({"x": np.zeros(8, np.float32), "y": np.zeros(4, np.float32)}, SGD))
        jobs.run(lambda job: job.kv.push({"y": np.ones(4, np.float32)}).wait())
        for _ in range(2):
            with pytest.raises(SynclineError, match=FAULTS[fault]):
                faulty.kv.push({"x": np.ones(8, np.float32)}).wait()
        with pytest.raises(SynclineError, match=FAULTS[fault]):
            faulty.close()
        other.kv.push({"y": np.ones(4, np.float32)}).wait()
        assert other.own_step == 2


def test_an_encoding_that_a_users_codec_cannot_read_closes_the_connection() -> None:
    with local_job(workers=1, transport="tcp", codec=f"{__name__}:sign") as jobs:
        register(jobs[0], 8)
        endpoint = jobs[0].exchange.routes.endpoints["server-0"]
        data = buffer_of(np.zeros(3, np.uint8))
        call = endpoint.call(stage_of(jobs[0], "sign", [[3]]), buffers=[data], payload_bytes=3)
        with pytest.raises(ConnectionLost, match="no encoding by sign: ValueError: cut short"):
            call.wait(PATIENCE)


@pytest.mark.parametrize(
    "settings",
    [{}, {"servers": 2}, {"policy": "async", "window": 2}, {"exchange": "ring"}, {"exchange": "ring", "workers": 3}],
    ids=["one-server", "sync", "async", "ring", "ring-of-three"],
)
@pytest.mark.parametrize("fault", ["longer", "wider", "raises"])
def test_a_pull_codec_that_breaks_its_word_is_told_to_who_waits_for_its_answer(
    fault: str, settings: dict[str, Any]
) -> None:
    """The servers encode. In a ring each worker's process has the parameters, and sums then go as they are."""

    def work(job: Job) -> str:
        job.kv.register({"x": np.zeros(8, np.float32), "y": np.zeros(4, np.float32)}, SGD)
        try:
            job.kv.push_pull({"x": np.ones(8, np.float32)}).wait()
        except SynclineError as error:
            return str(error)
        return ""

    with local_job(**{"workers": 2, "transport": "tcp", "pull_codec": f"{__name__}:{fault}", **settings}) as jobs:
        for said in jobs.run(work):
            assert re.search(FAULTS[fault], said) or (not said and "exchange" in settings), said
        for job in jobs:
            with contextlib.suppress(SynclineError):
                job.close()
