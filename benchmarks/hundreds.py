"""Rows about the coordinator of a job with hundreds of members: its processor time, and its memory.

The coordinator is a real one, as `syncline coordinator` starts it, with its page. Its members are played: each has a
connection of its own and says what a real one says, as often. A launcher looks at the job and a browser follows it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.match import take_pairs
from benchmarks.memory import check_memory_is_told, pss_bytes
from benchmarks.processor import check_is_measured, seconds_of
from benchmarks.row import Effort, Reach, Row, Samples
from benchmarks.showing import follow
from syncline.config import JobConfig
from syncline.core.layout import Parameter
from syncline.core.liveness import beat_seconds
from syncline.core.members import Address, Standing
from syncline.core.metrics import Metrics
from syncline.core.rule import Rule
from syncline.core.wire.control import (
    Heartbeat,
    Host,
    Install,
    Join,
    Joined,
    Prepare,
    Prepared,
    Register,
    Registered,
    Report,
    Uploaded,
    Watch,
)
from syncline.core.wire.message import Done, Message
from syncline.errors import JobFailed, ProtocolError, SynclineError, WaitTimeout
from syncline.launch import jobfile
from syncline.launch.watching import WATCH_SECONDS
from syncline.net import tcp
from syncline.net.rpc import Endpoint, Request, Stamp
from syncline.net.transport import Buffer, Peer
from syncline.stats import MemberStats, ProcessStats, PushBytes, ServerStats, StepTimes, WireStats
from syncline.usage import EARLY_SECONDS, EVERY_SECONDS
from syncline.worker.reporting import REPORT_SECONDS

#: Until the coordinator has all that it keeps of a minute, and the page has its packages.
WARM_SECONDS = 65.0
#: Of one figure: in it old readings are thinned once.
TURN_SECONDS = 30.0
#: How often a script reports its metrics with `job.report`.
METRICS_SECONDS = 1.0
START_SECONDS = 120.0
NUM_PARAMETERS = 64
#: Members on one host, and how far apart workers end the same step.
HOST_SIZE, TOGETHER_SECONDS = 8, 0.05


class PlayedMember:
    """One member: its connection, and the numbers that it tells, which grow as those of a real one do."""

    def __init__(self, file: jobfile.JobFile, role: str, name: str, number: int) -> None:
        self.role, self.name, self._number = role, name, number
        self._chance = random.Random(number)
        identity = tcp.Identity(file.job, file.token_bytes, Peer(role, name, 0))
        self._stamp = Stamp(file.job)
        self.endpoint = Endpoint(tcp.connect_tcp(file.host, file.port, identity, START_SECONDS), self._stamp, self)
        self._step = self._num_metrics = 0
        self._spent = dict.fromkeys(("compute", "data", "stage", "wait", "pull"), 0.0)
        self._peers: list[str] = []
        self._workers: list[str] = []
        self._told_at = self._reported_at = 0.0

    # -- a service ----------------------------------------------------------------------------------------

    def buffers_for(self, peer: Peer, message: Message, payload_bytes: int) -> Sequence[Buffer]:
        raise ProtocolError("no payload")

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        pass

    def handle(self, request: Request) -> None:
        if isinstance(request.message, Prepare):
            request.reply(Prepared([Standing(name, 0) for name in self._workers], 0))
        elif isinstance(request.message, Host | Install):
            request.reply(Done())

    # -- what it says -------------------------------------------------------------------------------------

    def ask_to_join(self) -> Callable[[], None]:
        """Returns what waits for the answer."""
        host, address = f"host-{self._number // HOST_SIZE}", Address("", "127.0.0.1", 1)
        call = self.endpoint.call(Join(self.role, self.name, host, os.getpid(), address, {}, self.name, "played"))

        def joined() -> None:
            answer = call.wait(START_SECONDS)
            assert isinstance(answer, Joined)
            self._stamp.incarnation = answer.incarnation
            names: dict[str, list[str]] = {"worker": [], "server": []}
            for member in answer.members:
                names[member.role].append(member.name)
            self._workers = names["worker"]
            self._peers = names["server" if self.role == "worker" else "worker"][:32]

        return joined

    def register(self) -> None:
        """The chief's model."""
        parameters = [Parameter(f"layer-{k}.weight", "float32", (4096,)) for k in range(NUM_PARAMETERS)]
        message = Register(0, parameters, [Rule("SGD", lr=0.1).spec], "mean")
        assert isinstance(self.endpoint.call(message).wait(START_SECONDS), Registered)
        self.endpoint.call(Uploaded(0)).wait(START_SECONDS)

    def beat(self, step: int, seconds: float) -> None:
        """A sign of life at this step, so many seconds after the last one."""
        num_steps, self._step = step - self._step, step
        for phase, part in (("compute", 0.7), ("data", 0.05), ("stage", 0.05), ("wait", 0.15), ("pull", 0.1)):
            self._spent[phase] += seconds * part * self._chance.lognormvariate(0.0, 0.1)
        now = time.monotonic()
        if self.role == "worker" and now - self._reported_at >= 0.9 * REPORT_SECONDS:
            self._reported_at = now
            self._report()
        stats = None
        if now - self._told_at >= EVERY_SECONDS - EARLY_SECONDS:
            self._told_at = now
            stats = self._stats()
        beat = Heartbeat(rtt_seconds=0.001, step=step, samples=32 * step, boundary=step, stride=1, stats=stats)
        if self.role == "server":
            beat = Heartbeat(
                rtt_seconds=0.001, clocks=dict.fromkeys(self._workers, step), num_updates=step, stats=stats
            )
        assert num_steps >= 0
        self.endpoint.call(beat)

    def _stats(self) -> MemberStats:
        step, size = self._step, 1 << 20
        wire = WireStats(frames_sent=step, frames_received=step, bytes_sent=size * step, bytes_received=size * step)
        told = None
        if self.role == "server":
            told = ServerStats(
                name=self.name,
                num_slices=8,
                parameter_bytes=8 * size,
                num_updates=8 * step,
                num_commits=step * len(self._workers),
                num_rounds=step,
                round_seconds=0.001 * step,
                staleness_count=8 * step,
                staleness_counts=(8 * step, 0, 0, 0),
                busiest=tuple((k, 0.0001 * step) for k in range(5)),
                wire=wire,
            )
        process = ProcessStats(cpu_seconds=0.05 * step, memory_bytes=500 * size)
        return MemberStats(
            process=process, wire=wire, peers=dict.fromkeys(self._peers, (size * step,) * 2), server=told
        )

    def _report(self) -> None:
        step = self._step
        compute, data, stage, wait, pull = self._spent.values()
        times = StepTimes(num_steps=step, compute=compute, data=data, stage=stage, wait=wait, pull=pull)
        pushed = PushBytes(socket=step << 20)
        self.endpoint.tell(
            Report(step, 32 * step, 0.05 * step, 0, step, 100_000, times, step, pushed, rates={"lr": 0.1})
        )

    def report_metrics(self) -> None:
        """What a script reports with `job.report`."""
        self._num_metrics += 1
        loss = 2.0 / (1.0 + 0.01 * self._step) + self._chance.gauss(0.0, 0.01)
        values = {"loss": (loss, 32.0), "accuracy": (1.0 - loss / 3.0, 32.0)}
        self.endpoint.call(Metrics(self._num_metrics, values, self._step))


class Hundreds:
    """A coordinator, and the members that are played to it."""

    def __init__(self, num_workers: int, num_servers: int, folder: pathlib.Path, *options: str) -> None:
        self._num = {"server": num_servers, "worker": num_workers}
        named = ["--job", "job.json", "--name", "hundreds", "-w", str(num_workers), "-s", str(num_servers)]
        # Members of a busy machine are slow, not dead.
        (folder / "syncline.toml").write_text("deadline_seconds = 60.0\nlongest_deadline_seconds = 120.0\n")
        words = [sys.executable, "-m", "syncline", "coordinator", *named, "--page", "auto", "--sink", "off", *options]
        self.file, self._log = folder / "job.json", folder / "coordinator.log"
        with open(self._log, "wb") as out:
            self.process = subprocess.Popen(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self._members: list[PlayedMember] = []
        self._chance = random.Random(1)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.num_looks = 0  #: that the browser has got
        self._trouble: list[str] = []

    def begin(self) -> None:
        """Returns when all members have joined, the model is registered and the page is open."""
        self._wait_for_file()
        file = jobfile.read(self.file)
        for role, count in self._num.items():
            self._members += [PlayedMember(file, role, f"{role}-{k}", k) for k in range(count)]
        for joined in [member.ask_to_join() for member in self._members]:
            joined()
        next(member for member in self._members if member.name == "worker-0").register()
        self._begin(self._play)
        launcher = tcp.Identity(file.job, file.token_bytes, Peer("launcher", "launcher", 0))
        endpoint = Endpoint(tcp.connect_tcp(file.host, file.port, launcher, START_SECONDS), Stamp(file.job))
        self._begin(lambda: self._watch(endpoint))
        self._begin(self._browse)

    def _wait_for_file(self) -> None:
        until = time.monotonic() + START_SECONDS
        while not (self.file.exists() and "the page: " in self._log.read_text()):
            self.look()
            if time.monotonic() > until:
                raise WaitTimeout(f"no coordinator within {START_SECONDS:g} s: {self._log.read_text()}")
            time.sleep(0.05)

    def _begin(self, run: Callable[[], None]) -> None:
        def until_closed() -> None:
            try:
                run()
            except (SynclineError, OSError, AssertionError) as error:
                if not self._closed.is_set():
                    self._trouble.append(f"{type(error).__name__}: {error}")

        self._threads.append(threading.Thread(target=until_closed, daemon=True))
        self._threads[-1].start()

    def look(self) -> None:
        """Raises where the coordinator or a thread has failed."""
        if self.process.poll() is not None:
            raise JobFailed(f"the coordinator has ended: {self._log.read_text()[-2000:]}")
        if self._trouble:
            raise JobFailed(self._trouble[0])

    # -- threads ------------------------------------------------------------------------------------------

    def _play(self) -> None:
        """Members of one host beat together; hosts, at any moment. Scripts report after the same step."""
        began, numbers = time.monotonic(), itertools.count()
        every_beat = beat_seconds(JobConfig(), len(self._members))
        due: list[tuple[float, int, float, Callable[[], None]]] = []
        for place, member in enumerate(self._members):
            phase = began + every_beat * (place // HOST_SIZE * HOST_SIZE / len(self._members))
            heapq.heappush(due, (phase, next(numbers), every_beat, self._beating(member, began, every_beat)))
            if member.role == "worker":  # in rounds all make their steps together
                at = began + 0.1 + self._chance.uniform(0.0, TOGETHER_SECONDS)
                heapq.heappush(due, (at, next(numbers), METRICS_SECONDS, member.report_metrics))
        while not self._closed.is_set():
            at, number, every, do = due[0]
            if (left := at - time.monotonic()) > 0 and self._closed.wait(left):
                return
            do()
            heapq.heapreplace(due, (at + every, number, every, do))

    @staticmethod
    def _beating(member: PlayedMember, began: float, every: float) -> Callable[[], None]:
        """Twenty steps a second, made by all together."""
        return lambda: member.beat(int(20 * (time.monotonic() - began)), every)

    def _watch(self, endpoint: Endpoint) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            endpoint.call(Watch()).wait(START_SECONDS)
        endpoint.close()

    def _browse(self) -> None:
        """Opens the page by its link, and follows the stream."""
        found = re.search(r"the page: http://([^/]+)(/open\S+)", self._log.read_text())
        assert found is not None
        for line in follow(found[1], found[2]):
            self.num_looks += line.startswith(b"data: ")
            if self._closed.is_set():
                return

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closed.set()
        self.process.terminate()
        try:
            self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for member in self._members:
            member.endpoint.close()
        for thread in self._threads:
            thread.join(START_SECONDS)


@contextlib.contextmanager
def hundreds(num_workers: int, num_servers: int, *options: str) -> Iterator[Hundreds]:
    """A job of that size, while it goes on."""
    with tempfile.TemporaryDirectory(prefix="syncline-") as folder:
        job = Hundreds(num_workers, num_servers, pathlib.Path(folder), *options)
        try:
            job.begin()
            yield job
        finally:
            job.close()


def _wait(job: Hundreds, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        job.look()
        time.sleep(min(left, 0.2))


def coordinator_processor(name: str, workers: int, servers: int, most_seconds: float, *, reach: Reach) -> Row:
    """What the coordinator uses of a core, beside what it may use."""

    def measure(effort: Effort) -> Samples:
        check_is_measured()
        with hundreds(workers, servers) as job:
            _wait(job, WARM_SECONDS)

            def take(side: str) -> float:
                if side == "reference":
                    return most_seconds
                before, began = seconds_of([job.process.pid]), time.monotonic()
                _wait(job, TURN_SECONDS)
                return (seconds_of([job.process.pid]) - before) / (time.monotonic() - began)

            return take_pairs(take, effort, time.monotonic())

    return Row(
        name=name,
        what=f"processor time of the coordinator in a second, {workers} workers and {servers} servers, its page open",
        reference=f"{most_seconds:.0%} of a core",
        reach=reach,
        measure=measure,
    )


def coordinator_memory_of_many(name: str, workers: int, servers: int, most_bytes: float, *, reach: Reach) -> Row:
    """All memory of the coordinator, its interpreter included."""

    def measure(effort: Effort) -> Samples:
        check_memory_is_told()
        with hundreds(workers, servers) as job:
            _wait(job, WARM_SECONDS)

            def take(side: str) -> float:
                if side == "reference":
                    return most_bytes
                _wait(job, 1.0)
                return pss_bytes(job.process.pid)

            return take_pairs(take, effort, time.monotonic())

    return Row(
        name=name,
        what=f"memory of the coordinator (PSS), {workers} workers and {servers} servers, its page open",
        reference=f"{most_bytes / 1e6:g} MB",
        reach=reach,
        measure=measure,
        unit="bytes",
    )
