"""The job, as the script of a worker sees it."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from syncline.config import JobConfig
from syncline.core.members import Member
from syncline.core.policy import policy_of
from syncline.core.wire.control import AskLife, Barrier, CommittedSteps, GivenLife, Joined, Leave, Passed, Roster
from syncline.core.wire.message import Message
from syncline.core.wire.pace import Pace
from syncline.errors import ConfigError, ConnectionLost, FencedError, Stopped, SynclineError
from syncline.net.link import Link
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.tracing import SpanSender
from syncline.stats import JobStats, WorkerDebugState, thread_names
from syncline.worker.checkpoint.boundary import STEP, Boundary
from syncline.worker.checkpoint.rng_state import OwnStream
from syncline.worker.checkpoint.saves import ScriptCheckpoints
from syncline.worker.collectives.peers import Peers
from syncline.worker.collectives.verbs import Collectives
from syncline.worker.current import forget
from syncline.worker.data.loop import tell_unused
from syncline.worker.data.samples import CoordinatorAsks, LoopHooks, WorkerSamples
from syncline.worker.exchange.finite import FiniteCheck
from syncline.worker.exchange.residuals import keep_residuals
from syncline.worker.exchange.servers import ServersExchange
from syncline.worker.kv import KeyValue
from syncline.worker.metrics import Measures
from syncline.worker.reporting import WorkerReporting
from syncline.worker.session import CoordinatorHandlers, CoordinatorSession, WhileWaiting, WorkerParts, left, place_of
from syncline.worker.stages import StageProcesses
from syncline.worker.steps import CannotResume, RunProgress, WorkerLife, checked_step, steps
from syncline.worker.validation import Measure, Validated, WorkerValidation
from syncline.worker.waits import ValidationCalled


def choose_device(said: str, members: Iterable[Member], host: str, local_rank: int) -> str:
    """The device set at launch. `auto`: one GPU per worker if this host has enough, else the CPU."""
    torch = sys.modules.get("torch")
    if said != "auto":
        if said.startswith("cuda") and torch is not None and not torch.cuda.is_available():
            raise ConfigError(f"--device {said}: torch sees no GPU here; leave it out, or use cpu")
        return said
    num_local = sum(member.role == "worker" and member.host == host for member in members)
    num_gpus = torch.cuda.device_count() if torch is not None else 0
    # Finished workers keep their ranks but are no longer members.
    return f"cuda:{local_rank}" if num_gpus >= max(num_local, local_rank + 1) else "cpu"


class Job:
    """One worker's place in a job. Made by `syncline.init()`; also a context manager."""

    def __init__(
        self,
        joined: Joined,
        me: Member,
        link: Link,
        handlers: CoordinatorHandlers,
        dial: Callable[[Member], Endpoint],
        stamp: Stamp,
        *,
        folder: pathlib.Path,
        say: Callable[[str], None],
        embedded: bool,
        beats: bool = True,
        peers: Peers | None = None,  # links to the other workers
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`embedded`: this is the only worker. `beats`: the coordinator is in another process and expects
        heartbeats.
        """
        self.config: JobConfig = joined.config
        self.is_embedded = embedded  #: whether server and coordinator run in this process for this worker only
        self.name, self.folder = me.name, folder  #: its own; where the job's files go
        self.is_late = joined.late  #: whether the job was running when this worker joined
        self._me, self._link, self._handlers, self._say = me, link, handlers, say
        self._on_close = on_close
        self._closed = threading.Event()
        self._place = (0, 1, 0)  # rank, world size, local rank
        self.own_step = 0  #: steps of this worker, in all its lives
        self.committed = CommittedSteps()  #: with local steps: how many of them its commits contain
        self.barrier_turns: dict[str, int] = {}
        self._before_rest: list[Callable[[], None]] = []
        self._after_wait: list[Callable[[], None]] = []
        self._device: str | None = None
        self._noticed: dict[str, None] = {}  # in their order
        self._last_committer: Hashable = None
        # committers that have made their last step before a rule stops the script
        self._have_finished: set[Hashable] = set()
        self.names_taken: dict[str, Any] = {}  # for DistributedOptimizer: the owner of each name
        self._rates: list[Callable[[], Mapping[str, Any]]] = []  # of optimizers
        self.stages: StageProcesses | None = None  #: with `--stages`: the other processes of this pipeline
        stamp.incarnation, stamp.generation = joined.incarnation, joined.generation
        handlers.rosters.listen(self._take_place)
        handlers.begin(link, joined, me.name, beats=beats and not embedded)
        self._take_place(handlers.rosters.newest)
        self._make_parts(joined, dial, stamp, peers)
        self.life = WorkerLife(self._ask_life(joined), in_rounds=self.in_rounds)
        self.own_step = self._steps_before()
        self.exchange.has_stepped_to(self.life.step)
        self._spans = SpanSender(link, self.exchange.spans) if self.exchange.spans is not None else None
        if self._spans is not None and not embedded:
            self._spans.start()
        if not embedded:
            self.reporting.begin(self._closed)
            self._checkpoints.notes.begin(self._closed)

    def _make_parts(
        self, joined: Joined, dial: Callable[[Member], Endpoint], stamp: Stamp, peers: Peers | None
    ) -> None:
        """Creates the parts in order of dependency. After the last line they answer the coordinator."""
        name, link, handlers, say = self.name, self._link, self._handlers, self._say
        finite = FiniteCheck(self.config, name, say)
        self.exchange = exchange = ServersExchange(
            self.config, handlers, link, dial, stamp, name=name, is_late=joined.late, say=say, finite=finite
        )
        lease_acks = exchange.lease_acks
        self.boundary = Boundary(exchange, lease_acks)
        meanwhile = WhileWaiting(
            leave_if_retiring=self.leave_if_retiring,
            follow=exchange.follow,
            look_for_validation=self.look_for_validation,
        )
        self._session = CoordinatorSession(
            name, self.config.wait_seconds, link, handlers, exchange.waits, self.boundary, self._closed, meanwhile
        )
        self.measures = Measures(self, link, handlers.signals, say)
        self.kv = KeyValue(
            exchange, self.ask, name, self.commits, self.stepped, self.leave_if_asked,
            lambda: handlers.signals.factor,
            self._tell_of_gradients if self.config.steps_locally else None,
        )  # fmt: skip
        self.own_stream = OwnStream(name, self._me.incarnation if joined.late else 0)  #: with `seed_everything`
        self.validation = WorkerValidation(self)
        hooks = LoopHooks(
            begins_training=self.own_stream.begin,
            between=self.validation.look_at_a_boundary,
            behind_epoch=self.validation.behind_epoch,
        )
        asks = CoordinatorAsks(self.ask, link)
        self.samples = WorkerSamples(asks, lease_acks, exchange.times, self, self.boundary, hooks)
        self._before_settle: list[Callable[[], None]] = [self.samples.let_go]
        self._progress = RunProgress(self.config, self.samples, lambda: self.step, joined.seconds)
        self._checkpoints = ScriptCheckpoints(self, link, handlers, self.own_stream, say, is_late=joined.late)
        self.state = self._checkpoints.state  #: what the script gets back when its job resumes
        keep_residuals(exchange.encoder, self.state, lambda: self.world_size, say)
        self.collectives = Collectives(self, self._me, handlers, peers)  #: `syncline.collectives` of this worker
        self.reporting = WorkerReporting(self, link)
        handlers.attach(
            WorkerParts(
                break_off=exchange.break_off,
                heartbeat=self.reporting.beat,
                copies=exchange,
                samples=self.samples,
                saves=self._checkpoints.saves,
                validation=self.validation,
            )
        )

    def _tell_of_gradients(self) -> None:
        self.notice(
            f"--sync-every {self.config.sync_every} does not apply to gradients that job.kv pushes: each is applied "
            'as it comes. Make the local steps in your script, and push their change with Rule("Add")'
        )

    def _ask_life(self, joined: Joined) -> GivenLife:
        """What the job knows of earlier lives. A worker that was there at the start has none."""
        if not joined.late:
            return GivenLife(step=joined.step)
        answer = self.ask(AskLife())
        assert isinstance(answer, GivenLife)
        return answer

    def _steps_before(self) -> int:
        """This worker's steps in earlier lives. With local steps the coordinator knows from reports how many the
        commits contain; a coordinator that was restarted since knows only their number.
        """
        life, every = self.life, self.config.sync_every
        return life.local_steps or life.own_step * (1 if every == "auto" else every)

    # -- who I am -----------------------------------------------------------------------------------------

    def _take_place(self, roster: Roster) -> None:
        self._place = place_of(self._me, roster) or self._place

    @property
    def generation(self) -> int:
        """Number of the membership that this worker knows of."""
        return self._handlers.rosters.newest.generation

    @property
    def rank(self) -> int:
        """Position among the workers of this generation."""
        return self._place[0]

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._place[1]

    @property
    def local_rank(self) -> int:
        """Position among the workers on this host."""
        return self._place[2]

    @property
    def num_local_workers(self) -> int:
        """Workers on this host."""
        members = self._handlers.rosters.newest.members
        return max(1, sum(member.role == "worker" and member.host == self._me.host for member in members))

    @property
    def num_hosts(self) -> int:
        """Hosts of the job's workers and servers."""
        members = self._handlers.rosters.newest.members
        return max(1, len({member.host for member in members if member.role in ("worker", "server")}))

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker of rank 0, whose registration and buffers are the job's."""
        return self._place[0] == 0

    @property
    def device(self) -> Any:
        """`cuda:LOCAL_RANK` when there are at least as many GPUs as workers on this host, else `cpu`."""
        if self._device is None:
            members = self._handlers.rosters.newest.members
            said = self.config.device if self.stages is None else "cpu"
            self._device = choose_device(said, members, self._me.host, self.local_rank)
            self.notice(f"computes on {self._device}")
        torch = sys.modules.get("torch")
        return torch.device(self._device) if torch is not None else self._device

    @property
    def known_device(self) -> str:
        """The device, if it has been determined; else `cpu`."""
        return self._device or "cpu"

    @property
    def checkpoints(self) -> ScriptCheckpoints:
        """The saved state of the script; adapters add to it."""
        return self._checkpoints

    @property
    def in_rounds(self) -> bool:
        """Whether the policy has all workers step together."""
        return policy_of(self.config).in_rounds

    def notice(self, text: str, *, is_own: bool = False) -> None:
        """Tells the user something, once. The chief speaks for all workers, unless `is_own` is set."""
        if (self.is_chief or is_own) and text not in self._noticed:
            self._noticed[text] = None
            self._say(text)

    # -- steps, samples, rest -----------------------------------------------------------------------------

    def commits(self, committer: Hashable) -> None:
        """Call before a step is committed or made locally. Ends the script if a rule has stopped training, or if
        this is a restarted worker that may have made the step before.
        """
        if self._closed.is_set():
            raise left(self.name)
        self.own_stream.begin()
        self._end_if_stopped(committer)
        if self.life.number == 1:  # no checks needed in a first life
            self.life.has_position = self.exchange.lease_acks.has_position or self.life.has_resumed
            return
        with self._leaving_if_it_cannot_resume():
            self.life.commits(in_leases=self.exchange.lease_acks.has_position)

    def uses_rates(self, rates: Mapping[str, Any]) -> None:
        """Checks the learning rates of the next commit. Ends a restarted script whose schedule started over."""
        with self._leaving_if_it_cannot_resume():
            self.life.uses_rates(
                {name: float(rate) for name, rate in rates.items()}, has_restored=self.state.num_loaded > 0
            )

    def tells_rates(self, rates: Callable[[], Mapping[str, Any]]) -> None:
        """Registers a function that returns the learning rates by optimizer and group; another thread calls it."""
        self._rates.append(rates)

    def rates(self) -> dict[str, float]:
        """The learning rates as they are now, by optimizer and group."""
        return {name: float(rate) for told in self._rates for name, rate in told().items()}

    @contextlib.contextmanager
    def _leaving_if_it_cannot_resume(self) -> Iterator[None]:
        try:
            yield
        except CannotResume as error:
            self._say(error.reason)
            self.abandon()
            raise

    def steps(self, count: int) -> Iterator[int]:
        """The loop of a script without a data set: `for step in job.steps(1000):` makes 1,000 steps of the job.

        In `sync` every worker makes all of them, together with the others; otherwise the workers share them. They
        are leased like samples, so that a worker that is started again goes on where the job is. The loop ends early
        when a rule stops the training. The n-th loop of a script is the n-th of the job.
        """
        return steps(self, count, self.exchange.enter)

    def resume_at(self, step: int | None = None) -> int:
        """For a loop of your own: says that the script goes on at this step, so that it can be started again.

        In `sync` a step is one of the job, otherwise one of this worker. Without `step`: where the job, or this
        worker, is. Returns the step to go on at: in `sync` others may have gone on meanwhile, and wait for this
        worker from now on. So it is called right before the loop: `for step in range(job.resume_at(), n):`
        """
        in_rounds = self.in_rounds and not self.config.steps_locally
        known = self.step if in_rounds else self.own_step
        step = known if step is None else checked_step(step)
        self.life.has_resumed = True
        return max(step, self.exchange.enter()) if in_rounds else step

    def stepped(self) -> None:
        """Counts a step: a push, or a local step between two pushes."""
        self.own_step += 1
        self.exchange.lease_acks.stepped()
        self.boundary.stepped()
        self._handlers.pacing.slow_down(self.leave_if_retiring)

    def pushed_local_steps(self) -> None:
        """All local steps so far are in commits."""
        commits = self.life.own_step + self.exchange.clock
        self.committed = CommittedSteps(commits, self.own_step, self.exchange.times.steps_per_push)

    @property
    def step(self) -> int:
        """The job's steps so far, as this worker knows them: what a schedule goes by.

        In `sync` these are rounds, the same number in all workers that were in the last one; otherwise pushes of all
        workers. A worker that joins later, or starts again, goes on where the job is. What counts is the parameter
        that was updated most often. With `sync_every`, where most steps are made locally: this worker's own.
        """
        if self.config.steps_locally:
            return self._checkpoints.resume.own_step + self.own_step
        return self.exchange.num_updates

    @property
    def should_stop(self) -> bool:
        """Whether training is over by one of the job's rules (`--stop`, `--max-steps`, `--max-time`).

        Loops over a DataLoader end by themselves then; a script without one asks here, once a step. If it does not,
        its next step raises `syncline.Stopped`.
        """
        return self.measures.should_stop

    @property
    def progress(self) -> float:
        """How much of the whole run is done, 0.0 to 1.0: for schedules that do not care who makes the steps.

        By `loader.epochs(n)`: epochs, and samples of the epoch. By `job.steps(n)`: steps. By `--max-steps` and
        `--max-time`: the job's steps and time. Of several, the one that ends first counts. In `sync` it is the same
        in all workers of a round (not by time). A worker that starts again, or a job that resumes, goes on where
        the job is. ConfigError where nothing says how long the run is.
        """
        return self._progress.now()

    @property
    def lr_factor(self) -> float:
        """What `--on-plateau` has made of learning rates: each is multiplied by it where it is used."""
        return self._handlers.signals.factor

    def report(self, **metrics: Any) -> None:
        """Tells the job this worker's metrics: numbers, or scalars of torch and NumPy, by name.

        They are merged over the workers, weighted by the samples since the last report; rules (`--stop`) go by them.
        A `syncline.Image`, `Histogram` or `Text` goes to the page and to TensorBoard: of each name the newest, at
        most one a second for the whole job.
        """
        self.measures.report(metrics)

    @property
    def samples_taken(self) -> int:
        """Samples that were handed out to this worker's training so far."""
        return self.samples.taken

    def before_rest(self, action: Callable[[], None]) -> None:
        """Something that must be sent before this worker rests or leaves."""
        self._before_rest.append(action)

    def after_wait(self, action: Callable[[], None]) -> None:
        """Something to be done when others went on without this worker, which had nothing to read meanwhile."""
        self._after_wait.append(action)

    def script_went_on(self) -> None:
        """Other workers have made the steps that this one skips: takes over their script's state."""
        self._checkpoints.resume.went_on()

    def catch_up(self, *, enters: bool = False) -> None:
        """Others went on without this worker. `enters`: it goes on with them, from their next round on."""
        if enters and self.in_rounds:
            self.exchange.enter()  # before it pulls: else a round may pass between the pull and its commit
        for action in self._after_wait:
            action()

    def before_settle(self, action: Callable[[], None]) -> None:
        """Something to be done before all open pushes are waited for: at a barrier, a rest, the end."""
        self._before_settle.append(action)

    def settle(self) -> None:
        """Returns when everything that was pushed is answered."""
        for action in self._before_settle:
            action()
        self.exchange.settle()

    def send_all(self) -> None:
        """Sends everything that is still to be pushed, then returns when it is answered."""
        self._send_all()
        self.exchange.settle()

    def _send_all(self) -> None:
        for action in (*self._before_rest, *self._before_settle):
            action()

    def retire(self, *, comes_back: bool = False) -> None:
        """Asks this worker to leave after its step, or while it waits for others. Callable from any thread or
        signal handler.

        `comes_back`: another process takes its place; the job waits for that.
        """
        self._handlers.comes_back = comes_back
        self._handlers.is_retiring = True

    @property
    def has_retired(self) -> bool:
        """Whether it has left because it was asked to, not because its script ended."""
        return self._handlers.has_retired

    @property
    def has_lost_coordinator(self) -> bool:
        """Whether the job has ended because its coordinator was told to end, or is gone."""
        over = self._handlers.over
        return over is not None and over.failed and over.culprit == "coordinator"

    def leave_if_asked(self) -> None:
        """Between two steps: ends the script if this worker was asked to leave; waits while the worker is held."""
        self.boundary.stepped()
        if self._handlers.is_retiring:
            self.leave_if_retiring()
        pacing = self._handlers.pacing
        if pacing.is_held:
            with self.boundary.standing():
                pacing.hold(self.leave_if_retiring, self.exchange.times)
        if not self.exchange.lease_acks.num_loops:
            self.validation.look_at_a_boundary()
            if self.boundary.notes_stop and self.should_stop:
                self.boundary.stops(STEP)  # the last save is from here: `Stopped` is raised in the middle of a step

    def _end_if_stopped(self, committer: Hashable) -> None:
        """If a rule has ended training and this commit contains no leased samples, the worker leaves the job and its
        script ends (`Stopped`).

        Of several committers (optimizers, or sets of names) each may finish the step that the last one made.
        """
        lease_acks, last, self._last_committer = self.exchange.lease_acks, self._last_committer, committer
        if not self.measures.should_stop or lease_acks.num_loops or lease_acks.is_any_held:
            return
        if not self._have_finished:
            self._have_finished |= {committer if last is None else last}
        if committer not in self._have_finished:
            self._have_finished.add(committer)
            return
        reason = self.measures.stopped_by
        self.close()
        raise Stopped(reason)

    def leave_if_retiring(self) -> None:
        """Ends the script if this worker was asked to leave while it waits for others."""
        if self._handlers.is_retiring and not self._closed.is_set():
            self._handlers.pacing.hear(Pace(self.name))
            self._handlers.retires_now()  # first: sending may call this again
            self.close()
            raise SystemExit(0)

    def look_for_validation(self) -> None:
        """Raises ValidationCalled if other workers wait for this one in a validation."""
        self.validation.while_waiting()

    def rest(self, *, leaves: bool = True) -> None:
        """Takes part in no round until the next push: this worker has finished its part of an epoch.

        `leaves`: a worker that was asked to leave may do so here.
        """
        self._rest(is_pause=False, leaves=leaves)

    def pause(self) -> None:
        """Takes part in no round until the next push: waits in an epoch for samples that other workers hold."""
        self._rest(is_pause=True)

    def _rest(self, *, is_pause: bool, leaves: bool = True) -> None:
        if leaves:
            self.leave_if_asked()
        self._send_all()
        self.exchange.rest(is_pause=is_pause)
        self.reporting.report()

    # -- the others ---------------------------------------------------------------------------------------

    def barrier(self, name: str) -> None:
        """Returns when every worker has come here, as often as this one. Raises WaitTimeout."""
        if not isinstance(name, str):
            raise ConfigError(f'job.barrier({name!r}): give a name, a str, e.g. job.barrier("epoch")')
        self._meet(name, {})

    def merge(
        self, name: str, values: Mapping[str, tuple[float, float]], *, turn: int | None = None
    ) -> dict[str, float]:
        """For adapters: the weighted means of these values, each given with its weight, over all workers, which come
        here together as to a barrier of this name. `turn`: how often workers have come here, where a restarted
        script does not repeat all of them.
        """
        if turn is not None:
            self.barrier_turns[name] = turn - 1
        return self._meet(name, dict(values))

    def _meet(self, name: str, values: dict[str, tuple[float, float]]) -> dict[str, float]:
        self.leave_if_asked()
        for action in self._before_settle:
            action()
        turn = self.barrier_turns[name] = self.barrier_turns.get(name, 0) + 1
        place, answer = self.boundary.place("barrier", name), None
        while answer is None:
            phase = self.exchange.enter_barrier()
            try:
                with self.boundary.standing(place):
                    answer = self.ask(Barrier(name, turn, phase, values))
            except ValidationCalled as called:
                called.answer()
        assert isinstance(answer, Passed)
        if turn == 1 and answer.turn and self.samples.num_skipped and self.samples.is_in_epoch:
            self.barrier_turns[name] = answer.turn  # the others passed it in epochs that this worker skipped
            return self._meet(name, values)
        self.exchange.pass_barrier(answer)
        return answer.values

    def validate(
        self, fn: Measure, dataset: Any, every: str | int = "epoch", *,
        batch_size: int = 256, collate_fn: Any = None, name: str = "",
    ) -> Validated:  # fmt: skip
        """From now on the workers validate together, each sample once: behind every epoch, every N steps, or so often
        (`"500steps"`, `"10m"`). `fn(batch)` returns means over the batch, by name; their means over the set are
        readings of the job, which rules (`--stop`, `--best`) go by. With a name: as NAME/METRIC.

        With torch fn runs without gradients, and the model in eval mode. What fn draws from random states is undone.
        """
        return self.validation.add(fn, dataset, every, batch_size, collate_fn, name)

    def save(self) -> str:
        """Saves the job as it is now; the name of the checkpoint. In `sync`, workers that call it at the same step
        get the same one.

        Its script's state is that of this call: inside of a loop it is best called last. Where a batch was read and
        is in no step yet, or in local steps, it is made when it is, not waited for, and the name is empty; also in
        `sync` when not all workers call it, since the others wait in their step for this one.
        """
        return self._checkpoints.save()

    def put_back(self) -> None:
        """In a job that resumed: `job.state` and the random states as they were saved, now.

        Loops over our loaders see to it themselves; this is for a loop of your own, to be called before it.
        """
        self._checkpoints.resume.put_back()

    def ask(self, message: Message, meanwhile: Callable[[], None] = lambda: None) -> Message:
        """Asks the coordinator. Long waits are reported."""
        return self._session.ask(message, meanwhile)

    def stats(self) -> JobStats:
        """The job's numbers and this worker's own."""
        return self.reporting.stats()

    def debug_state(self) -> WorkerDebugState:
        """What this worker is at, for tests and bug reports; asks no other process."""
        exchange, saves = self.exchange, self._checkpoints.saves
        now = exchange.waits.now
        return WorkerDebugState(
            name=self.name,
            incarnation=self._me.incarnation,
            generation=self.generation,
            step=self.step,
            clock=exchange.clock,
            open_clocks=exchange.open_clocks,
            num_early_slices=exchange.num_early_slices,
            servers=tuple(exchange.routes.endpoints),
            primaries=dict(exchange.routes.primaries),
            has_leased=exchange.lease_acks.is_any_held,
            is_paused=self._handlers.pacing.is_held,
            waits_for=now.text if now is not None else "",
            save_number=saves.number,
            num_save_notes=saves.num_notes,
            save_patience_seconds=saves.patience_seconds,
            is_boundary_watched=self.boundary.is_watched,
            notices=tuple(self._noticed),
            threads=thread_names(),
        )

    # -- how it ends --------------------------------------------------------------------------------------

    def explain(self, error: SynclineError) -> SynclineError:
        """The reason for a broken connection, by the coordinator if it answers soon."""
        return self._session.explain(error)

    @property
    def evicted(self) -> FencedError | None:
        """Why this worker is out, if it is."""
        return self._handlers.evicted

    @property
    def has_failed(self) -> bool:
        """Whether this worker has heard that the job ended without success; its next call raises `JobFailed`."""
        return self._handlers.over is not None and self._handlers.over.failed

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left the job, or was abandoned."""
        return self._closed.is_set()

    def close(self) -> None:
        """Finishes what is open and leaves the job. Safe to call again."""
        if self._closed.is_set():
            return
        try:
            if not self._handlers.has_retired:
                self.validation.finish()
            self.send_all()
            tell_unused(self)
            self.measures.finish()
            self.reporting.report()
            self._tell_staleness()
            self.collectives.leave()
            self.exchange.leave()
            if not self._handlers.has_retired:
                self._checkpoints.finish()
            if self._spans is not None:
                self._spans.close()
            self._say_leave()
        finally:
            self.abandon()

    def _say_leave(self) -> None:
        try:
            with self.exchange.waits.of("leave"):
                retired = self._handlers.has_retired
                self._link.call(Leave(retired, retired and self._handlers.comes_back), self.config.wait_seconds)
        except FencedError:
            return  # the servers know already
        except ConnectionLost as error:
            raise self.explain(error) from None

    def _tell_staleness(self) -> None:
        """Reports the policy's staleness, at the chief's end of a job without rounds."""
        if self.is_chief and self.own_step and not policy_of(self.config).stands_still:
            self._say(f"{self.config.policy}: {self.stats().cost_told}")

    def abandon(self) -> None:
        """Closes everything without leaving: the job treats it as a death."""
        self._closed.set()
        if self._spans is not None:
            self._spans.stop()
        self.samples.is_over = True
        forget(self)
        self._link.close()
        self.exchange.close()
        self.collectives.close()
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
