"""Versions of a job that is followed: which one answers while new ones come all the time. The job is a fake."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.serve.arrays import INPUTS, ROW, Linear
from tests.serve.saved import Caller, expected

from syncline.core.layout import Parameter, Segment, arrange, place
from syncline.core.members import Address, Member
from syncline.core.rule import Rule
from syncline.core.wire.following import AskCut, CutPlace, GivenCut, GivenSlices, ReadCut
from syncline.core.wire.message import Done
from syncline.serve import Server, following
from syncline.serve.control import ControlRequest
from syncline.serve.following import FollowedJob, JobFollower, JobSource

JOB = FollowedJob(job="ab" * 8, token="cd" * 32, host="127.0.0.1", port=1, name="j")


def segment_of(index: int, name: str, shape: tuple[int, ...]) -> Segment:
    parameter = Parameter(name, "float32", shape)
    segment = arrange((parameter,), [Rule("SGD", lr=1.0)], "mean", index=index, ordinal=index, first_parameter=index)
    return place(segment, ["server-0"], {}, 1 << 20, index)[0]


class FakeJob:
    """One server with two slices; all numbers of a step are the number of the step."""

    def __init__(self) -> None:
        self.segments = [segment_of(0, "weight", (3, 4)), segment_of(1, "bias", (3,))]
        self.slices = [part.id for segment in self.segments for part in segment.slices]
        assert len(self.slices) == 2
        self.server = Member("server-0", "server", 1, "host", Address("", "127.0.0.1", 1))
        self.step = 0
        self.values = dict.fromkeys(self.slices, 0.0)
        self.versions = dict.fromkeys(self.slices, 0)
        self.num_read = 0

    def train(self, steps: int = 1) -> None:
        self.step += steps
        for number in self.slices:
            self.values[number] += steps
            self.versions[number] += steps

    def cut(self, num_segments: int) -> GivenCut:
        places = [CutPlace(self.server, self.slices, [self.versions[number] for number in self.slices])]
        return GivenCut(1, self.step, self.segments[num_segments:], places)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    """Every follower follows this one."""
    made = FakeJob()

    class FakeEndpoint:
        is_open = True

        def __init__(self, connection: Any, stamp: Any) -> None:
            pass

        def call(self, message: Any, *, into: Any = None, **settings: Any) -> FakeCall:
            if isinstance(message, AskCut):
                return FakeCall(made.cut(message.num_segments))
            if isinstance(message, ReadCut):
                for number, room in zip(message.slices, into(GivenSlices(message.slices)), strict=True):
                    np.frombuffer(room, np.float32)[:] = made.values[number]
                    made.num_read += 1
            return FakeCall(Done())

        def mention(self, message: Any) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(following.tcp, "connect_tcp", lambda *given: None)
    monkeypatch.setattr(following, "Endpoint", FakeEndpoint)
    return made


class FakeCall:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def wait(self, seconds: float) -> Any:
        return self.answer


def numbers(follower: JobFollower) -> set[float]:
    found = follower.parameters.weights()
    return {float(number) for _, data in found.values() for number in data.view(np.float32)}


def test_what_has_not_changed_is_not_read_again(job: FakeJob) -> None:
    follower = JobFollower(JOB, "follower")
    assert follower.read_cut() and job.num_read == 2
    assert not follower.read_cut() and job.num_read == 2
    job.train()
    assert follower.read_cut() and job.num_read == 4 and numbers(follower) == {1.0}


def test_slices_that_were_restored_are_read_again(job: FakeJob) -> None:
    """A server dies and takes its slices from a checkpoint of step 3. They keep the highest version that was
    acknowledged, 5, so the number stands for other bytes than before.
    """
    source = JobSource(JOB, "follower", copies=True)
    job.train(5)
    (before,) = source.look()
    assert job.num_read == 2
    job.server = msgspec.structs.replace(job.server, incarnation=2)
    job.values = dict.fromkeys(job.slices, 3.0)
    (after,) = source.look()
    found = {float(number) for _, data in after.read().values() for number in data.view(np.float32)}
    assert job.num_read == 4 and found == {3.0}
    assert after.digest != before.digest and after.name != before.name
    (again,) = source.look()
    assert job.num_read == 4 and again.digest == after.digest


def test_a_loader_that_starts_again_after_the_job_is_gone_says_so() -> None:
    """It fails at nothing: the versions are there. But `status` must say why nothing new comes."""
    source = JobSource(JOB, "loader", copies=False)
    source.resume("5", "digest")
    assert list(source.look()) == [] and source.trouble
    source.close()


@pytest.fixture
def server(job: FakeJob, tmp_path: pathlib.Path) -> Iterator[Any]:
    settings: dict[str, Any] = {"port": 0, "runs": str(tmp_path), "inputs": INPUTS, "refresh": 0.02}
    job.train()
    with Server(Linear, follow=JOB, **settings) as made:
        yield made


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def newest(server: Any) -> str:
    return str(server.standing()["versions"][-1]["name"])


def train_until_loaded(job: FakeJob, server: Any) -> None:
    """A step, and its version is in memory."""
    job.train()
    wait_for(lambda: newest(server) == str(job.step))


def answered_by(server: Any) -> str:
    with Caller(server.url) as call:
        status, answer = call.post("/predict", {"input": ROW})
    assert status == 200
    version = str(answer["model_version"])
    assert np.allclose(answer["output"], expected(int(version), [ROW])[0])
    return version


def test_a_rollback_stays_while_the_job_trains(job: FakeJob, server: Any) -> None:
    """The next version comes within seconds: a rollback that ends with it would be none."""
    train_until_loaded(job, server)
    assert answered_by(server) == "2"
    told = server.control(ControlRequest("rollback"))
    assert told["current"] == "1" and told["is_pinned"]
    for _ in range(4):
        train_until_loaded(job, server)
        assert answered_by(server) == "1" and server.standing()["is_pinned"]
    told = server.control(ControlRequest("unpin"))
    assert told["current"] == "6" and not told["is_pinned"]
    train_until_loaded(job, server)
    assert answered_by(server) == "7"


def test_a_pinned_version_stays_while_the_job_trains(job: FakeJob, server: Any) -> None:
    train_until_loaded(job, server)
    assert server.control(ControlRequest("pin", version="1"))["is_pinned"]
    for _ in range(4):
        train_until_loaded(job, server)
        assert answered_by(server) == "1"
    assert server.control(ControlRequest("unpin"))["current"] == "6" == answered_by(server)


def test_a_canary_of_a_job_is_its_newest_version(job: FakeJob, server: Any) -> None:
    """Each new version takes the place of the canary, and none takes over before it was said."""
    server.control(ControlRequest("canary", share=0.5))
    for _ in range(4):
        train_until_loaded(job, server)
        told = server.standing()
        assert (told["current"], told["canary"]) == ("1", str(job.step))
        assert sorted(answered_by(server) for _ in range(4)) == sorted(["1", "1", *[str(job.step)] * 2])
    told = server.control(ControlRequest("canary", share=1.0))
    assert told["current"] == str(job.step) and not told["share"]
    train_until_loaded(job, server)
    assert answered_by(server) == str(job.step) == "6"
