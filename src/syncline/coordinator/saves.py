"""Saves: when one is due, the snapshot of the job, and the answer to those who asked for it.

One save at a time. The reconfiguration thread starts it and takes the snapshot, so that no generation begins
meanwhile; a thread of the save writes it (`checkpoint_writer`).

1. A save is requested, or due by time or steps.
2. Workers are asked to come to a boundary between two batches, and note the states of their scripts there.
3. The snapshot barrier of all servers closes, until all of them have the same commits. The servers mark this point.
4. Servers and workers write what they have marked and noted. The manifest comes last.

Only commits behind a closed barrier wait, and the callers of a save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping

from syncline import faults
from syncline.config import JobConfig
from syncline.coordinator.checkpoint_writer import CheckpointWriter, SnapshotPoint, adopt
from syncline.coordinator.cuts import CutService
from syncline.coordinator.job import JobContext, ServerCalls
from syncline.coordinator.leases import LeaseService
from syncline.coordinator.registration import RegistrationService
from syncline.core.checkpoint.schedule import Checkpoint
from syncline.core.checkpoint.snapshot import AGAIN_SECONDS, MOST_TRIES, SNAPSHOT_SECONDS, SnapshotAttempt, ledger_at
from syncline.core.members import Member
from syncline.core.policy import policy_of
from syncline.core.slice_state import Identity
from syncline.core.units import Interval, interval, size
from syncline.core.wire.checkpoints import (
    EndSave,
    Expect,
    Mark,
    Noted,
    OpenSnapshotBarrier,
    Save,
    Saved,
    SnapshotBarrierClosed,
)
from syncline.core.wire.message import Done, Message
from syncline.errors import ConfigError, ConnectionLost, StoreError, SynclineError, WaitTimeout
from syncline.net.rpc import Call, Endpoint, Request
from syncline.stats import Wait

#: How long a save waits for workers other than the chief to come to a boundary. It can do without their scripts.
EXPECT_SECONDS = 10.0
#: The same while all workers stand still for a validation: those not at a boundary by then will not come to one.
VALIDATED_SECONDS = 2.0
#: In rounds other workers may wait for the step of a caller: after this time the caller goes on without a result.
ASKER_SECONDS = 1.0
#: The default of --save-every.
DEFAULT_EVERY = "10m"
#: How often the schedule is checked.
LOOK_SECONDS = 1.0


@dataclasses.dataclass
class SaveRequest:
    """A save that was asked for, or is due."""

    reason: str
    callers: list[Request]
    since: float = 0.0
    not_before: float = 0.0
    num_tries: int = 0
    is_final: bool = False
    hurries: bool = False
    turn: int = 0  # of the validation for which all workers stand still until the snapshot is taken
    on_snapshot: Callable[[], None] | None = None  # the snapshot is taken, or was given up

    def merge(self, later: SaveRequest) -> None:
        """One save serves both requests."""
        self.callers += later.callers
        self.is_final |= later.is_final
        self.hurries |= later.hurries
        if later.turn:
            self.turn, self.on_snapshot = later.turn, later.on_snapshot

    def hold_workers(self, turn: int, on_snapshot: Callable[[], None]) -> None:
        """All workers stand still for this validation until `on_snapshot` is called."""
        self.turn, self.on_snapshot = turn, on_snapshot

    def forget_workers(self) -> None:
        """The workers have gone on: a retry does not release them again."""
        self.turn, self.on_snapshot = 0, None

    def release_workers(self) -> None:
        """The workers that stand still for the snapshot may go on."""
        if self.on_snapshot is not None:
            self.on_snapshot()

    def has_blocking_callers(self, waiting: Collection[str], seconds: float) -> bool:
        """Whether a caller has waited for too long while the `waiting` workers may wait for the caller's step."""
        return seconds >= ASKER_SECONDS and any(_is_blocking(caller, waiting) for caller in self.callers)

    def take_blocking_callers(self, waiting: Collection[str]) -> list[Request]:
        """Removes and returns these callers. They get a reply without a checkpoint."""
        found = [caller for caller in self.callers if _is_blocking(caller, waiting)]
        self.callers = [caller for caller in self.callers if caller not in found]
        return found


def _is_blocking(caller: Request, waiting: Collection[str]) -> bool:
    return caller.peer.role == "worker" and any(name != caller.peer.name for name in waiting)


@dataclasses.dataclass
class SaveInProgress:
    """A save that has begun. Until its snapshot begins, new requests are merged into it."""

    number: int
    request: SaveRequest
    began: float
    chief: str
    workers: Collection[str]  # of its beginning, less those that are out since
    expects: dict[str, Call] = dataclasses.field(default_factory=dict)  # by worker: to come to a boundary
    asked: dict[str, Endpoint] = dataclasses.field(default_factory=dict)  # the connections of these calls
    has_snapshot_begun: bool = False
    snapshot_at: float = 0.0
    is_snapshot_taken: bool = False

    def unasked(self, endpoints: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
        """Connections on which a worker has not been asked yet. After a restart of the coordinator, workers come back
        one after the other.
        """
        found = {name: endpoints[name] for name in self.workers if name in endpoints}
        return {name: endpoint for name, endpoint in found.items() if self.asked.get(name) is not endpoint}

    def expect(self, endpoints: Mapping[str, Endpoint], wake: Callable[[], None]) -> None:
        """Asks workers to come to a boundary; calls `wake` at each answer."""
        expects: dict[str, Call] = {}
        for name, endpoint in endpoints.items():
            with contextlib.suppress(ConnectionLost):
                expects[name] = endpoint.call(Expect(self.number))
        self.asked = {**self.asked, **endpoints}
        self.expects = {**self.expects, **expects}  # replaced as a whole, since other threads read it
        for call in expects.values():
            call.when_done(wake)

    @property
    def waiting(self) -> list[str]:
        """Workers that have not come to a boundary yet; also those that could not be asked yet."""
        expects = self.expects
        return [name for name in self.workers if name not in expects or not expects[name].is_done]

    def next_deadline(self, now: float) -> float:
        """When the next time limit of this save is over."""
        times = [self.began + seconds for seconds in (ASKER_SECONDS, VALIDATED_SECONDS, EXPECT_SECONDS)]
        return min((at for at in times if at > now), default=math.inf)

    def may_snapshot(self, now: float, config: JobConfig) -> bool:
        """Whether all workers are at a boundary, or the chief is and the time of the others is over."""
        patience = min(config.wait_seconds, config.save_seconds / 2) if self.request.hurries else config.wait_seconds
        if self.request.turn:
            patience = min(patience, VALIDATED_SECONDS)
        waiting, passed = self.waiting, now - self.began
        is_late = passed >= min(EXPECT_SECONDS, patience)
        return not waiting or (is_late and self.chief not in waiting) or passed >= patience


def take_snapshot(job: JobContext, calls: ServerCalls, cut: SnapshotAttempt) -> SnapshotPoint | None:
    """Closes the snapshot barriers, in turns, until all servers have the same commits; then marks this point.

    None: a reconfiguration became urgent.
    """
    verdict, began = "further", time.monotonic()
    while verdict == "further":
        answers = calls.ask(dict.fromkeys(cut.servers, cut.close()), gives_way=True, until=cut.until)
        if not answers and time.monotonic() < cut.until:
            return None
        closed = {name: answer for name, answer in answers.items() if isinstance(answer, SnapshotBarrierClosed)}
        if closed.keys() != set(cut.servers):
            raise WaitTimeout(f"some open commits did not finish within {SNAPSHOT_SECONDS:g} s")
        verdict = cut.decide(closed, time.monotonic())
    if verdict == "late":
        raise WaitTimeout(
            f"steps of {', '.join(cut.behind())} reached only some servers within {SNAPSHOT_SECONDS:g} s"
        )
    with job.lock:
        state = job.membership.state
        point = SnapshotPoint(
            number=cut.number,
            servers=cut.servers,
            clocks=dict(cut.clocks),
            workers={name: state.members[name].incarnation for name in job.membership.workers()},
            segments=tuple(job.registry.layout.segments),
            leases=ledger_at(state.leases, cut.acks, cut.late),
            num_updates=cut.num_updates,
            versions=cut.versions,
            seconds=state.saves.seconds + job.seconds(),
        )
    faults.reach("snapshot_barrier.closed")
    if not calls.ask(dict.fromkeys(cut.servers, Mark(cut.number)), gives_way=False, until=cut.until + 1.0):
        raise WaitTimeout("the servers did not take their snapshots in time")
    point.barrier_seconds = time.monotonic() - began
    faults.reach("save.marked")
    return point


def local_step_at(point: SnapshotPoint, noted: Mapping[str, Noted]) -> int:
    """With local steps: the steps of the worker that has made the most. Commits after the boundary that a worker has
    noted contain as many steps as it made for a commit then.
    """
    clocks = {name: point.clocks.get((name, point.workers.get(name, 0)), note.clock) for name, note in noted.items()}
    steps = (note.step + (clocks[name] - note.clock) * note.steps_per_push for name, note in noted.items())
    return max([0, *steps])


class SaveService:
    """All saves of a job, one at a time."""

    def __init__(
        self,
        job: JobContext,
        calls: ServerCalls,
        leases: LeaseService,
        registration: RegistrationService,
        writer: CheckpointWriter,
        cuts: CutService,
    ) -> None:
        self._job, self._calls, self._leases, self._registration = job, calls, leases, registration
        self._writer, self._cuts = writer, cuts
        self._finishing: dict[str, tuple[Request, float]] = {}  # workers whose scripts have ended, and since when
        self._next: SaveRequest | None = None
        self.current: SaveInProgress | None = None
        self._every: Interval | None = None
        self._due_at, self._due_step = 0.0, 0
        self._has_ended = False  # the last save of the job was made, or given up
        saves = job.membership.state.saves
        self._must_recover = bool(saves.open)  # an earlier coordinator died within a save
        if saves.last is not None:
            saves.seconds = max(saves.seconds, saves.last.seconds)  # trained before this coordinator began

    @property
    def _is_on(self) -> bool:
        return bool(self._job.config.checkpoint)

    def under_way(self) -> tuple[str, str]:
        """Under the lock: why the save that is under way was asked for, and the next one; "" where there is none."""
        current = self.current.request.reason if self.current is not None else ""
        return current, self._next.reason if self._next is not None else ""

    # -- requests -----------------------------------------------------------------------------------------

    def handle_save(self, request: Request, message: Save) -> None:
        """Replies when the checkpoint exists, or with the reason why there is none."""
        if not self._is_on:
            raise ConfigError("nothing says where to save: start the job with --checkpoint DIR")
        if not self._job.registry.layout.segments:
            raise StoreError("there is nothing to save: the job has registered no parameters yet")
        with self._job.lock:
            reason = message.reason or f"{request.peer.name} asked for it"
            self.request_save(reason, request, hurries=request.peer.role == "launcher")
        self._job.wake_reconfigurer()

    def request_save(
        self, reason: str, caller: Request | None = None, *, is_final: bool = False, hurries: bool = False
    ) -> SaveRequest:
        """Under the lock: adds to the save whose snapshot has not begun, or to the next one."""
        current = self.current
        known = current.request if current is not None and not current.has_snapshot_begun else self._next
        if known is None:
            known = self._next = SaveRequest(reason, [], time.monotonic())
        known.callers += [caller] if caller is not None else []
        known.is_final |= is_final
        known.hurries |= hurries
        return known

    def save_for_validation(self, turn: int, on_snapshot: Callable[[], None]) -> None:
        """Under the lock: all workers stand still until `on_snapshot` is called."""
        self.request_save(f"validation {turn}").hold_workers(turn, on_snapshot)
        self._job.wake_reconfigurer()

    def script_has_ended(self, request: Request) -> None:
        """A worker's script has ended. Replies when all have ended, the last save is made and followers have read the
        last state; at once if nothing is saved and others go on.
        """
        name = request.peer.name
        with self._job.lock:
            self._finishing[name] = (request, time.monotonic())
            self._job.membership.finishing.add(name)
        self._let_finished_leave()

    def member_is_out(self, member: Member) -> None:
        """Under the lock."""
        if self.current is not None:
            self.current.workers = [name for name in self.current.workers if name != member.name]
        self._finishing.pop(member.name, None)
        self._job.membership.finishing.discard(member.name)

    # -- what is due --------------------------------------------------------------------------------------

    def note_progress(self) -> None:
        """Under the lock: a member has reported its step."""
        if self._every is not None and self._every.steps and self.has_work(time.monotonic()):
            self._job.wake_reconfigurer()

    def has_work(self, now: float) -> bool:
        """Under the lock: whether `run_due` has something to do."""
        if not self._job.membership.formed:
            return False
        if self._must_recover or self._may_leave() or self._blocking_callers(now) is not None:
            return True
        current = self.current
        if current is None:
            return self._may_begin() and self._is_due(now)
        if current.has_snapshot_begun:
            return False
        if current.unasked(self._job.endpoints):
            return True
        return self._may_begin() and current.may_snapshot(now, self._job.config)

    def seconds_left(self, now: float) -> float:
        """Under the lock: how long the reconfiguration thread may sleep."""
        times = [now + LOOK_SECONDS]
        if self.current is not None and not self.current.has_snapshot_begun:
            times.append(self.current.next_deadline(now))
        elif self._next is not None:
            times.append(self._next.not_before)
        elif self._every is not None and self._every.seconds:
            times.append(self._due_at)
        return max(0.01, min(times) - now)

    @property
    def due_step(self) -> int:
        """The step at which the next regular save is due; 0 before the first look at the schedule."""
        return self._due_step

    def _may_begin(self) -> bool:
        """Whether there are parameters, all with values and a primary, and all used leases are known."""
        registry, membership = self._job.registry, self._job.membership
        if not registry.layout.segments or len(registry.ready) != len(registry.layout.segments):
            return False
        primaries = {replica_set.primary for replica_set in membership.state.replica_sets.values()}
        return primaries <= set(membership.servers()) and not self._leases.awaits_acks

    def _is_due(self, now: float) -> bool:
        if not self._is_on:
            return False
        if self._next is None and self._are_all_finishing() and not self._has_ended:
            self.request_save("the end of the job", is_final=True)
        if self._next is not None:
            return now >= self._next.not_before
        if self._every is None:
            self._every = interval("--save-every", self._job.config.save_every or DEFAULT_EVERY)
            newest = self._job.membership.state.saves.newest
            self._count_from(now, newest.step if newest else 0)
        if self._every.steps:
            return self._job.step() >= self._due_step
        return now >= self._due_at

    def _count_from(self, now: float, step: int) -> None:
        if self._every is not None:
            self._due_at, self._due_step = now + self._every.seconds, step + self._every.steps

    def waits(self, now: float) -> list[Wait]:
        """Under the lock: workers whose scripts have ended wait for the others, before the last save."""
        if not self._finishing:
            return []
        others = [name for name in self._job.membership.workers() if name not in self._finishing]
        if not others:
            return []
        return [Wait(name, 0, others, now - at, "the last save") for name, (_, at) in self._finishing.items()]

    def _are_all_finishing(self) -> bool:
        membership = self._job.membership
        workers = membership.workers()
        # Without checkpoints some may have been let go that have not left yet.
        return bool(workers) and set(workers) <= membership.finishing and "worker" not in membership.awaited.values()

    def _may_leave(self) -> bool:
        """Whether the workers whose scripts have ended may leave."""
        if self._job.membership.workers() and not self._are_all_finishing():
            self._cuts.scripts_run()
        if not self._finishing or not self._are_all_finishing():
            return not self._is_on and bool(self._finishing)
        if self.current is not None or self._next is not None:
            return False
        if self._is_on and not self._has_ended and self._job.registry.layout.segments:
            return False
        return self._cuts.may_end(time.monotonic())

    # -- in the reconfiguration thread --------------------------------------------------------------------

    def run_due(self) -> None:
        """Begins the save that is due; takes the snapshot of the one whose workers are at a boundary."""
        now = time.monotonic()
        if self._must_recover:
            self._recover()
        with self._job.lock:
            begins = self.current is None and self._may_begin() and self._is_due(now)
            save = self._begin(now) if begins else self.current
            blocking = self._blocking_callers(now)
            released = blocking[0].take_blocking_callers(blocking[1]) if blocking is not None else []
            step = self._job.step()
        for caller in released:
            caller.reply(Saved("", step))
        if save is not None and not save.has_snapshot_begun:
            self._expect(save)
        with self._job.lock:
            is_ready = save is not None and not save.has_snapshot_begun and save.may_snapshot(now, self._job.config)
        if is_ready and save is not None:
            faults.reach("save.expected")
            self._snapshot(save)
        self._let_finished_leave()

    def _let_finished_leave(self) -> None:
        with self._job.lock:
            requests = [request for request, _ in self._finishing.values()] if self._may_leave() else []
            if requests:
                self._finishing = {}
        for request in requests:
            request.reply(Done())

    def _recover(self) -> None:
        """Ends the save in which an earlier coordinator died. With a manifest the checkpoint is complete."""
        saves = self._job.membership.state.saves
        self._tell_all(EndSave(saves.open))
        found = adopt(saves.open_folder, saves.token, self._job.event)
        with self._job.lock:
            if found is not None:
                saves.last, saves.num_saved = found, saves.num_saved + 1
                self._job.event(f"the coordinator was restarted; {found.name} was already complete")
            elif self._is_on:
                self.request_save("the coordinator was restarted during a save")
            saves.open, saves.open_folder = 0, ""
            self._must_recover = False
            self._job.try_keep()
        if found is not None:  # the steps after a save were not done yet
            threading.Thread(target=self._writer.tidy, args=(found,), name="tidy", daemon=True).start()

    def _begin(self, now: float) -> SaveInProgress:
        """Under the lock. The number of the save is kept, so that the next coordinator can end it."""
        saves = self._job.membership.state.saves
        request = self._next or SaveRequest("a regular one", [], now)
        saves.num_begun += 1
        saves.open = saves.num_begun
        self._job.keep()
        self._next = None
        membership = self._job.membership
        self.current = SaveInProgress(saves.open, request, now, membership.chief, membership.workers())
        return self.current

    def _expect(self, save: SaveInProgress) -> None:
        with self._job.lock:
            endpoints = save.unasked(self._job.endpoints)
        if endpoints:
            save.expect(endpoints, self._job.wake_reconfigurer)

    def _blocking_callers(self, now: float) -> tuple[SaveRequest, list[str]] | None:
        """Under the lock: a request whose callers have waited too long, and the workers that it waits for."""
        if not policy_of(self._job.config).in_rounds:
            return None
        request, current = self._next, self.current
        if current is not None and not current.has_snapshot_begun:
            request, since, waiting = current.request, current.began, current.waiting
        elif request is not None:
            asked = {caller.peer.name for caller in request.callers} | self._job.membership.finishing
            since, waiting = request.since, [name for name in self._job.membership.workers() if name not in asked]
        if request is None or not request.has_blocking_callers(waiting, now - since):
            return None
        return request, waiting

    # -- the snapshot -------------------------------------------------------------------------------------

    def _snapshot(self, save: SaveInProgress) -> None:
        with self._job.lock:
            if not self._may_begin():
                return
            primaries = {replica_set.primary for replica_set in self._job.membership.state.replica_sets.values()}
            # A later caller may have a commit that is not in this snapshot: it gets the next save.
            save.has_snapshot_begun = True
            save.snapshot_at = time.monotonic()
            self._registration.hold()
        cut = SnapshotAttempt(save.number, primaries, save.snapshot_at + SNAPSHOT_SECONDS, self._boundaries(save))
        try:
            point = take_snapshot(self._job, self._calls, cut)
        except SynclineError as error:
            self._retry(save, primaries, str(error))
            return
        finally:
            self._registration.release()
        if point is None:
            self._retry(save, primaries, "", is_urgent=True)
            return
        save.is_snapshot_taken = True
        save.request.release_workers()
        if save.request.is_final and not save.request.turn and self._is_saved(point):
            self._finish(save, None)
            return
        threading.Thread(target=self._write, args=(save, point), name="save", daemon=True).start()

    def _boundaries(self, save: SaveInProgress) -> dict[Identity, Noted]:
        """Where the workers' boundaries are. The last try ignores them: a script may behave differently now."""
        if save.request.num_tries + 1 >= MOST_TRIES:
            return {}
        answers = {name: call.answer for name, call in save.expects.items()}
        with self._job.lock:
            members = self._job.membership.state.members
            return {
                (name, members[name].incarnation): answer
                for name, answer in answers.items()
                if isinstance(answer, Noted) and name in members
            }

    def _is_saved(self, point: SnapshotPoint) -> bool:
        """Whether the newest checkpoint has the same state. With another slicing the versions may agree by chance."""
        newest = self._job.membership.state.saves.newest
        now = (self._writer.root, point.num_updates, point.versions)
        return newest is not None and (newest.root, newest.num_updates, newest.versions) == now

    def _retry(self, save: SaveInProgress, servers: Collection[str], reason: str, *, is_urgent: bool = False) -> None:
        """Ends this try and lets commits pass. The next try has another number."""
        self._tell_all(OpenSnapshotBarrier(save.number), servers)
        self._tell_all(EndSave(save.number))
        request = save.request
        if save.is_snapshot_taken:
            request.forget_workers()
        request.num_tries += not is_urgent
        if request.num_tries >= MOST_TRIES:
            self._finish(save, StoreError(f"after {MOST_TRIES} tries: {reason}"))
            return
        if reason:
            self._job.log_line(f"a save is tried again: {reason}")
        with self._job.lock:
            request.not_before = time.monotonic() + (0.1 if is_urgent else AGAIN_SECONDS)
            self.current = None
            later, self._next = self._next, request
            if later is not None:
                request.merge(later)

    # -- in the thread of the save ------------------------------------------------------------------------

    def _write(self, save: SaveInProgress, point: SnapshotPoint) -> None:
        noted = [name for name, call in save.expects.items() if isinstance(call.answer, Noted | Done)]
        answers = {name: call.answer for name, call in save.expects.items() if isinstance(call.answer, Noted)}
        point.local_step = local_step_at(point, answers)
        try:
            made = self._writer.write(point, noted, save.chief, save.request.turn)
        except ConnectionLost as error:
            self._retry(save, point.servers, str(error))
        except SynclineError as error:
            self._finish(save, error)
        except Exception as error:  # our own bug: it costs the save, not the job
            self._finish(save, StoreError(f"{type(error).__name__}: {error}"))
            raise
        else:
            try:
                self._writer.tidy(made, waits=save.request.is_final)
            finally:
                self._finish(save, None, made, point.barrier_seconds)

    def _finish(
        self,
        save: SaveInProgress,
        error: SynclineError | None,
        made: Checkpoint | None = None,
        barrier_seconds: float = 0.0,
    ) -> None:
        """The save is made, or given up: reports it, keeps it and replies to the callers."""
        self._tell_all(EndSave(save.number))
        request = save.request
        if not save.is_snapshot_taken:
            request.release_workers()
        with self._job.lock:
            saves = self._job.membership.state.saves
            if error is not None:
                saves.num_failed, saves.failure = saves.num_failed + 1, str(error)
                self._job.event(f"a save was given up ({request.reason}): {error}; the job continues", "checkpoint")
            elif made is not None:
                saves.last, saves.num_saved = made, saves.num_saved + 1
                passed, barrier_ms = time.monotonic() - save.snapshot_at, 1000 * barrier_seconds
                self._job.event(
                    f"saved {made.name}: {size(made.num_bytes)} in {passed:.1f} s; commits were held "
                    f"for {barrier_ms:.{0 if barrier_ms >= 10 else 1}f} ms ({request.reason})",
                    "checkpoint",
                )
            saves.open, saves.open_folder = 0, ""
            self._job.try_keep()
            self._has_ended |= request.is_final
            self.current = None
            newest = saves.newest
            reached = made.step if made is not None else self._job.step()
            self._count_from(time.monotonic(), reached)
        for caller in request.callers:
            if error is not None or newest is None:
                caller.refuse(error or StoreError("nothing was saved"))
            else:
                caller.reply(Saved(newest.name, newest.step))
        self._job.wake_reconfigurer()

    def _tell_all(self, message: Message, names: Collection[str] | None = None) -> None:
        with self._job.lock:
            known = self._job.endpoints
            endpoints = [known[name] for name in (known if names is None else names) if name in known]
        for endpoint in endpoints:
            endpoint.mention(message)

    def close(self) -> None:
        self._writer.close()
