"""The job, as the script of a worker sees it."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import msgspec

from syncline.client.kv import KeyValue
from syncline.client.servers import ServersExchange
from syncline.config import JobConfig
from syncline.core.membership import Member
from syncline.core.messages import (
    AskStats,
    AskWhy,
    Barrier,
    GivenStats,
    GivenWhy,
    Joined,
    Leave,
    Message,
    Over,
    Passed,
    Report,
)
from syncline.core.policy import policy_of
from syncline.core.rounds import by_name
from syncline.errors import ConfigError, ConnectionLost, JobFailed, ProtocolError, SynclineError, WaitTimeout
from syncline.net.rpc import Endpoint, Request
from syncline.net.transport import Buffer, Peer
from syncline.stats import JobStats, ServerStats, StepTimes, apply_seconds

REPORT_SECONDS = 0.5
#: How long a broken connection waits for the coordinator's word on why.
VERDICT_SECONDS = 4.0
_current: Job | None = None
_of_thread = threading.local()  # several workers in one process: each thread has its own


def current_job() -> Job:
    """The job that `syncline.init()` joined or started in this process."""
    job: Job | None = getattr(_of_thread, "job", None) or _current
    if job is None:
        raise ConfigError("there is no job yet; call syncline.init() first")
    return job


def has_current_job() -> bool:
    return getattr(_of_thread, "job", None) is not None or _current is not None


class FromCoordinator:
    """What the coordinator says to a worker: that the job is over."""

    def __init__(self) -> None:
        self.over: Over | None = None
        self.heard = threading.Event()
        self.on_failure: Callable[[], None] = lambda: None

    def landing(self, peer: Peer, message: Message, payload_bytes: int) -> list[Buffer]:
        raise ProtocolError(f"{type(message).__name__} has no payload")

    def handle(self, request: Request) -> None:
        if isinstance(request.message, Over):
            self._hear(request.message)

    def lost(self, endpoint: Endpoint, reason: str) -> None:
        self._hear(Over(True, "coordinator", f"the coordinator is gone: {reason}"))

    def _hear(self, over: Over) -> None:
        if self.over is None:
            self.over = over
            self.heard.set()
            if over.failed:
                self.on_failure()


class Job:
    """One worker's place in a job. Made by `syncline.init()`; also a context manager."""

    def __init__(
        self,
        joined: Joined,
        me: Member,
        coordinator: Endpoint,
        hearing: FromCoordinator,
        dial: Callable[[Member], Endpoint],
        *,
        folder: pathlib.Path,
        say: Callable[[str], None],
        embedded: bool,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.config: JobConfig = joined.config
        self.name, self.generation = me.name, joined.generation
        self.folder = folder  #: where the job's files go
        self._members, self._me = joined.members, me
        self._coordinator, self._hearing, self._say = coordinator, hearing, say
        self._on_close = on_close
        servers = {m.name: dial(m) for m in joined.members if m.role == "server"}
        self.exchange = ServersExchange(self.config, servers, explain=self.explain, say=say)
        hearing.on_failure = self._break_off
        self.kv = KeyValue(self.exchange, self._ask, self.name, self.stepped)
        self.step = 0  #: steps that this worker has made
        self._turns: dict[str, int] = {}
        self.samples_taken = 0  #: handed out to this worker's training so far
        self._first_sample, self._sample_seconds = 0.0, 0.0
        self._progress = (0, 0, 0)
        self._before_rest: list[Callable[[], None]] = []
        self._before_settle: list[Callable[[], None]] = []
        self._closed = threading.Event()
        self._device: str | None = None
        self._noticed: set[str] = set()
        self.names_taken: dict[str, Any] = {}  # for DistributedOptimizer: whose names are whose
        self.loaders_begun: set[object] = set()  # for DataLoader: what was iterated over from epoch 0 on
        if not embedded:
            threading.Thread(target=self._report_regularly, name="report", daemon=True).start()

    # -- who I am -----------------------------------------------------------------------------------------

    def _workers(self) -> list[Member]:
        workers = [member for member in self._members if member.role == "worker"]
        return sorted(workers, key=lambda member: by_name(member.name))

    @functools.cached_property
    def rank(self) -> int:
        """Position among the workers of this generation."""
        return [member.name for member in self._workers()].index(self.name)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._workers())

    @property
    def local_rank(self) -> int:
        """Position among the workers on this host."""
        return [m.name for m in self._workers() if m.host == self._me.host].index(self.name)

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker of rank 0, whose registration and buffers are the job's."""
        return self.rank == 0

    @property
    def device(self) -> Any:
        """`cuda:LOCAL_RANK` when there are at least as many GPUs as workers on this host, else `cpu`."""
        if self._device is None:
            self._device = self._choose_device()
            self.notice(f"computes on {self._device}")
        torch = sys.modules.get("torch")
        return torch.device(self._device) if torch is not None else self._device

    def _choose_device(self) -> str:
        torch = sys.modules.get("torch")
        if self.config.device != "auto":
            if self.config.device.startswith("cuda") and torch is not None and not torch.cuda.is_available():
                raise ConfigError(f"--device {self.config.device}: torch sees no GPU here; leave it out, or say cpu")
            return self.config.device
        num_local = sum(member.host == self._me.host for member in self._workers())
        num_gpus = torch.cuda.device_count() if torch is not None else 0
        return f"cuda:{self.local_rank}" if num_gpus >= num_local else "cpu"

    def notice(self, text: str) -> None:
        """Tells the user something, once; in a job of several workers the chief speaks for all."""
        if self.is_chief and text not in self._noticed:
            self._noticed.add(text)
            self._say(text)

    # -- steps, samples, rest -----------------------------------------------------------------------------

    def stepped(self) -> None:
        """A step was made: by a push, or locally between two of them."""
        self.step += 1

    def begin_epoch(self, epoch: int, num_batches: int) -> None:
        """A loader begins epoch number `epoch` (from 0), with this many batches for this worker."""
        self._progress = (epoch, 0, num_batches)

    def took(self, num_samples: int) -> None:
        """A loader has handed out a batch of this many samples."""
        now = time.monotonic()
        self._first_sample = self._first_sample or now
        self._sample_seconds = now - self._first_sample
        self.samples_taken += num_samples
        epoch, step, steps = self._progress
        self._progress = (epoch, step + 1, steps)

    def before_rest(self, action: Callable[[], None]) -> None:
        """Something that must be sent before this worker rests or leaves."""
        self._before_rest.append(action)

    def before_settle(self, action: Callable[[], None]) -> None:
        """Something to be done before all open pushes are waited for: at a barrier, a rest, the end."""
        self._before_settle.append(action)

    def rest(self) -> None:
        """Takes part in no round until the next push: this worker has finished its part."""
        for action in (*self._before_rest, *self._before_settle):
            action()
        self.exchange.rest()
        self._report()

    # -- the others ---------------------------------------------------------------------------------------

    def barrier(self, name: str) -> None:
        """Returns when every worker has come here, as often as this one. Raises WaitTimeout."""
        for action in self._before_settle:
            action()
        turn = self._turns[name] = self._turns.get(name, 0) + 1
        answer = self._ask(Barrier(name, turn, self.exchange.step_aside()))
        assert isinstance(answer, Passed)
        self.exchange.begin_stretch(answer.stretch)

    def _ask(self, message: Message) -> Message:
        try:
            return self._coordinator.call(message).wait(self.config.wait_seconds)
        except WaitTimeout:
            seconds = self.config.wait_seconds
            what = type(message).__name__.lower()
            raise WaitTimeout(f"{self.name}: {what} has waited {seconds:g} s: {self._why()}") from None
        except ConnectionLost as error:
            raise self.explain(error) from None

    def _why(self) -> str:
        try:
            answer = self._coordinator.call(AskWhy()).wait(5.0)
        except SynclineError as error:
            return str(error)
        return answer.reason if isinstance(answer, GivenWhy) else ""

    def stats(self) -> JobStats:
        """The job's numbers and this worker's own."""
        self._report()
        answer = self._ask(AskStats())
        assert isinstance(answer, GivenStats)
        servers = tuple(answer.servers)
        pushes = sum(server.staleness_count for server in servers)
        stale = sum(server.staleness_sum for server in servers)
        seconds, busy = answer.seconds, answer.sample_seconds
        return JobStats(
            name=self.name,
            step=self.step,
            seconds=seconds,
            samples=answer.samples,
            samples_per_second=answer.samples / busy if busy else 0.0,
            own_samples=self.samples_taken,
            staleness_mean=stale / pushes if pushes else 0.0,
            staleness_max=max((server.staleness_max for server in servers), default=0),
            lag_max=max((server.lag_max for server in servers), default=0),
            times=self._times(servers),
            servers=servers,
            wire=self.exchange.stats() + self._coordinator.stats(),
        )

    def _times(self, servers: Sequence[ServerStats]) -> StepTimes:
        own = self.exchange.times.times()
        return msgspec.structs.replace(own, apply=apply_seconds(servers) * own.num_steps)

    def _report(self) -> None:
        epoch, step, steps = self._progress
        with contextlib.suppress(SynclineError):
            times = self.exchange.times.times()
            taken, seconds = self.samples_taken, self._sample_seconds
            self._coordinator.tell(Report(self.step, taken, seconds, epoch, step, steps, times))

    def _report_regularly(self) -> None:
        last = -1
        while not self._closed.wait(REPORT_SECONDS):
            if self.step != last and self._coordinator.is_open:
                last = self.step
                self._report()

    # -- how it ends --------------------------------------------------------------------------------------

    def explain(self, error: SynclineError) -> SynclineError:
        """Why a connection broke, by the coordinator's word if it comes soon."""
        self._hearing.heard.wait(VERDICT_SECONDS)
        over = self._hearing.over
        if over is None or not over.failed:
            return error
        return JobFailed(f"the job has ended: {over.reason}")

    def _break_off(self) -> None:
        """The job has failed: whoever waits for a server must not wait any longer."""
        self.exchange.break_off()

    def close(self) -> None:
        """Finishes what is open and leaves the job. Safe to call again."""
        if self._closed.is_set():
            return
        try:
            for action in (*self._before_rest, *self._before_settle):
                action()
            self.exchange.settle()
            self._report()
            self._tell_staleness()
            self.exchange.leave()
            self._ask(Leave())
        finally:
            self.abandon()

    def _tell_staleness(self) -> None:
        """What the policy has cost so far, at the chief's end of a job in which nobody waits for everybody."""
        if self.is_chief and self.step and not policy_of(self.config).in_rounds:
            stats = self.stats()
            self._say(
                f"{self.config.policy}: staleness {stats.staleness_mean:.2f} updates in the mean, "
                f"{stats.staleness_max} at most"
            )

    def abandon(self) -> None:
        """Lets go of everything without a word: the job will take it for a death."""
        global _current
        self._closed.set()
        if _current is self:
            _current = None
        self.exchange.close()
        self._coordinator.close()
        self._on_close()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.abandon()


def make_current(job: Job) -> Job:
    """From now on, this is the process's job."""
    global _current
    _current = job
    return job


@contextlib.contextmanager
def current_in_thread(job: Job) -> Iterator[None]:
    """This is the job of the calling thread, while it lasts."""
    _of_thread.job = job
    try:
        yield
    finally:
        _of_thread.job = None
