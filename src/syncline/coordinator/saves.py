"""Saves that are to be, and the one that has begun: who asked, and for whom is waited."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from syncline import faults
from syncline.config import JobConfig
from syncline.coordinator.checkpoint_writer import CheckpointWriter, Taken, adopt
from syncline.coordinator.job import JobContext, ServerCalls
from syncline.coordinator.leases import LeaseService
from syncline.coordinator.registration import RegistrationService
from syncline.core.checkpoint.schedule import Checkpoint, Every, every
from syncline.core.checkpoint.snapshot import AGAIN_SECONDS, CUT_SECONDS, MOST_TRIES, Cut, ledger_at
from syncline.core.members import Member
from syncline.core.policy import policy_of
from syncline.core.slice_state import Identity
from syncline.core.units import size
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

#: For workers other than the chief to come to a boundary; a save without a slow one's script is still a save.
EXPECT_SECONDS = 10.0
#: The same where all workers wait for the cut: who is not at a boundary by now does not come to one.
VALIDATED_SECONDS = 2.0
#: In rounds others may wait for the step of who has asked: then it goes on without its answer.
ASKER_SECONDS = 1.0


@dataclasses.dataclass
class Wanted:
    """A save that is to be."""

    reason: str
    requests: list[Request]
    since: float = 0.0
    not_before: float = 0.0
    num_tries: int = 0
    is_final: bool = False
    hurries: bool = False
    turn: int = 0  # the validation for which all workers stand still until the cut is made
    on_cut: Callable[[], None] = lambda: None  # or is not to be had

    def join(self, later: Wanted) -> None:
        """What was asked for meanwhile is this one."""
        self.requests += later.requests
        self.is_final |= later.is_final
        self.hurries |= later.hurries
        if later.turn:
            self.turn, self.on_cut = later.turn, later.on_cut

    def has_askers(self, waiting: Collection[str], seconds: float) -> bool:
        """Whether anybody has waited for so long while others are waited for, who may wait for its step."""
        return seconds >= ASKER_SECONDS and any(_is_asker(request, waiting) for request in self.requests)

    def let_go(self, waiting: Collection[str]) -> list[Request]:
        """These are answered now."""
        found = [request for request in self.requests if _is_asker(request, waiting)]
        self.requests = [request for request in self.requests if request not in found]
        return found


@dataclasses.dataclass
class UnderWay:
    """One that has begun: until its cut begins, whoever asks for a save has this one."""

    number: int
    wanted: Wanted
    began: float
    chief: str
    expects: dict[str, Call] = dataclasses.field(default_factory=dict)
    is_cut: bool = False
    cut_at: float = 0.0
    is_marked: bool = False  # the cut is made: who stood still for it goes on

    def expect(self, endpoints: Mapping[str, Endpoint], wake: Callable[[], None]) -> None:
        """Asks workers to come to a boundary. `wake`: at each answer."""
        expects: dict[str, Call] = {}
        for name, endpoint in endpoints.items():
            with contextlib.suppress(ConnectionLost):
                expects[name] = endpoint.call(Expect(self.number))
        self.expects = expects  # whole, since others look at it meanwhile
        for call in expects.values():
            call.when_done(wake)

    @property
    def waiting(self) -> list[str]:
        """Workers that have come to no boundary yet."""
        return [name for name, call in self.expects.items() if not call.is_done]

    def next_look(self, now: float) -> float:
        """When something else may be so, though nobody has said anything."""
        times = [self.began + seconds for seconds in (ASKER_SECONDS, VALIDATED_SECONDS, EXPECT_SECONDS)]
        return min((at for at in times if at > now), default=math.inf)

    def is_expected(self, now: float, config: JobConfig) -> bool:
        """The chief is at a boundary, and whoever came to one soon. Who is gone is waited for no more."""
        patience = min(config.wait_seconds, config.save_seconds / 2) if self.wanted.hurries else config.wait_seconds
        if self.wanted.turn:
            patience = min(patience, VALIDATED_SECONDS)
        waiting, passed = self.waiting, now - self.began
        is_late = passed >= min(EXPECT_SECONDS, patience)
        return not waiting or (is_late and self.chief not in waiting) or passed >= patience


def _is_asker(request: Request, waiting: Collection[str]) -> bool:
    return request.peer.role == "worker" and any(name != request.peer.name for name in waiting)


def finishing_waits(finishing: Mapping[str, float], workers: Sequence[str]) -> list[Wait]:
    """Whose scripts have ended, and for so long, before the last save, for those who go on."""
    others = [name for name in workers if name not in finishing]
    return [Wait(name, 0, others, seconds, "the last save") for name, seconds in finishing.items() if others]


def find_level(job: JobContext, calls: ServerCalls, cut: Cut) -> Taken | None:
    """Gates are closed, in turns, until the job is level; then it is marked. None: something was urgent."""
    verdict, began = "further", time.monotonic()
    while verdict == "further":
        answers = calls.ask(dict.fromkeys(cut.servers, cut.close()), gives_way=True, until=cut.until)
        if not answers and time.monotonic() < cut.until:
            return None
        closed = {name: answer for name, answer in answers.items() if isinstance(answer, SnapshotBarrierClosed)}
        if closed.keys() != set(cut.servers):
            raise WaitTimeout(f"not all commits that had begun came to their end within {CUT_SECONDS:g} s")
        verdict = cut.decide(closed, time.monotonic())
    if verdict == "late":
        raise WaitTimeout(f"steps of {', '.join(cut.behind())} came to some servers only within {CUT_SECONDS:g} s")
    with job.lock:
        state = job.membership.state
        segments = tuple(job.registry.layout.segments)
        taken = Taken(
            number=cut.number,
            servers=cut.servers,
            clocks=dict(cut.clocks),
            workers={name: state.members[name].incarnation for name in job.membership.workers()},
            segments=segments,
            leases=ledger_at(state.leases, cut.uses, cut.late),
            num_updates=cut.num_updates,
            versions=cut.versions,
            seconds=state.saves.seconds + job.seconds(),
        )
    faults.reach("gate.closed")
    if not calls.ask(dict.fromkeys(cut.servers, Mark(cut.number)), gives_way=False, until=cut.until + 1.0):
        raise WaitTimeout("the servers did not mark their slices in time")
    taken.gate_seconds = time.monotonic() - began
    faults.reach("save.marked")
    return taken


#: Where only the folder was said.
DEFAULT_EVERY = "10m"
#: Between two looks for the next save.
LOOK_SECONDS = 1.0


class SaveService:
    """All saves of a job, one at a time."""

    def __init__(
        self,
        job: JobContext,
        calls: ServerCalls,
        leases: LeaseService,
        registration: RegistrationService,
        writer: CheckpointWriter,
    ) -> None:
        self._job, self._calls, self._leases, self._registration = job, calls, leases, registration
        self._writer = writer
        self._finishing: dict[str, tuple[Request, float]] = {}  # since when
        self._wanted: Wanted | None = None
        self._under_way: UnderWay | None = None
        self._every: Every | None = None
        self._due_at, self._due_step = 0.0, 0
        self._has_ended = False  # the last save is made, or was given up
        saves = job.membership.state.saves
        self._is_taking_over = bool(saves.open)
        if saves.last is not None:
            saves.seconds = max(saves.seconds, saves.last.seconds)  # before this coordinator began

    @property
    def _is_on(self) -> bool:
        return bool(self._job.config.checkpoint)

    # -- who asks -----------------------------------------------------------------------------------------

    def handle_save(self, request: Request, message: Save) -> None:
        """Answered when the checkpoint exists, or with the reason why not."""
        if not self._is_on:
            raise ConfigError("nothing says where to save: start the job with --checkpoint DIR")
        if not self._job.registry.layout.segments:
            raise StoreError("there is nothing to save: the job has registered no parameters yet")
        with self._job.lock:
            who = message.reason or f"{request.peer.name} asked for it"
            self._want(who, request, hurries=request.peer.role == "launcher")
        self._job.wake_reconfigurer()

    def _want(
        self, reason: str, request: Request | None = None, *, is_final: bool = False, hurries: bool = False
    ) -> None:
        """Under the lock."""
        known = self._under_way.wanted if self._under_way and not self._under_way.is_cut else self._wanted
        if known is None:
            known = self._wanted = Wanted(reason, [], time.monotonic())
        known.requests += [request] if request is not None else []
        known.is_final |= is_final
        known.hurries |= hurries

    def save_for_validation(self, turn: int, on_cut: Callable[[], None]) -> None:
        """Under the lock: all workers stand still for this validation, until the cut is made, or cannot be."""
        self._want(f"validation {turn}")
        known = self._under_way.wanted if self._under_way and not self._under_way.is_cut else self._wanted
        assert known is not None
        known.turn, known.on_cut = turn, on_cut
        self._job.wake_reconfigurer()

    def script_has_ended(self, request: Request) -> None:
        """A worker's script has ended: answered when all have, and the last save is made."""
        name = request.peer.name
        with self._job.lock:
            self._finishing[name] = (request, time.monotonic())
            self._job.membership.finishing.add(name)

    def member_is_out(self, member: Member) -> None:
        """Under the lock: it is out, or has left."""
        self._finishing.pop(member.name, None)
        self._job.membership.finishing.discard(member.name)

    # -- what is due --------------------------------------------------------------------------------------

    def note_progress(self) -> None:
        """Under the lock: somebody has said how far it is."""
        if self._every is not None and self._every.steps and self.has_work(time.monotonic()):
            self._job.wake_reconfigurer()

    def has_work(self, now: float) -> bool:
        """Under the lock."""
        if not self._job.membership.formed:
            return False
        if self._is_taking_over or self._may_go() or self._askers(now) is not None:
            return True
        if self._under_way is None:
            return self._may_begin() and self._is_due(now)
        under_way = self._under_way
        return not under_way.is_cut and self._may_begin() and under_way.is_expected(now, self._job.config)

    def seconds_left(self, now: float) -> float:
        """Under the lock: until it is worth another look."""
        times = [now + LOOK_SECONDS]
        if self._under_way is not None and not self._under_way.is_cut:
            times.append(self._under_way.next_look(now))
        elif self._wanted is not None:
            times.append(self._wanted.not_before)
        elif self._every is not None and self._every.seconds:
            times.append(self._due_at)
        return max(0.01, min(times) - now)

    def _may_begin(self) -> bool:
        """What is registered has its values and is where it should be, and there is something; and it is known what
        was used of the samples."""
        registry, membership = self._job.registry, self._job.membership
        if not registry.layout.segments or len(registry.ready) != len(registry.layout.segments):
            return False
        is_there = {replica_set.primary for replica_set in membership.state.replica_sets.values()} <= set(
            membership.servers()
        )
        return is_there and not self._leases.awaits_acks

    def _is_due(self, now: float) -> bool:
        if not self._is_on:
            return False
        if self._wanted is None and self._are_all_finishing() and not self._has_ended:
            self._want("the end of the job", is_final=True)
        if self._wanted is not None:
            return now >= self._wanted.not_before
        if self._every is None:
            self._every = every("--save-every", self._job.config.save_every or DEFAULT_EVERY)
            newest = self._job.membership.state.saves.newest
            self._count_from(now, newest.step if newest else 0)
        if self._every.steps:
            return self._job.step() >= self._due_step
        return now >= self._due_at

    def _count_from(self, now: float, step: int) -> None:
        if self._every is not None:
            self._due_at, self._due_step = now + self._every.seconds, step + self._every.steps

    def waits(self, now: float) -> list[Wait]:
        return finishing_waits(
            {k: now - at for k, (_, at) in self._finishing.items()}, self._job.membership.workers()
        )

    def _are_all_finishing(self) -> bool:
        membership = self._job.membership
        workers = membership.workers()
        return (
            bool(workers) and set(workers) <= self._finishing.keys() and "worker" not in membership.awaited.values()
        )

    def _may_go(self) -> bool:
        """Whether those whose scripts have ended may leave."""
        if not self._finishing or not self._are_all_finishing():
            return not self._is_on and bool(self._finishing)
        if self._under_way is not None or self._wanted is not None:
            return False
        return self._has_ended or not self._is_on or not self._job.registry.layout.segments

    # -- in the thread of the changes ---------------------------------------------------------------------

    def run_due(self) -> None:
        """Nothing is urgent: begins what is due, cuts what is expected."""
        now = time.monotonic()
        if self._is_taking_over:
            self._take_over()
        with self._job.lock:
            begins = self._under_way is None and self._may_begin() and self._is_due(now)
            under_way = self._begin(now) if begins else self._under_way
            askers = self._askers(now)
            released = askers[0].let_go(askers[1]) if askers is not None else []
            step = self._job.step()
        for request in released:
            request.reply(Saved("", step))
        if begins and under_way is not None:
            self._expect(under_way)
        with self._job.lock:
            is_ready = under_way is not None and not under_way.is_cut and under_way.is_expected(now, self._job.config)
        if is_ready and under_way is not None:
            faults.reach("save.expected")
            self._cut(under_way)
        self._let_go()

    def _let_go(self) -> None:
        with self._job.lock:
            requests = [request for request, _ in self._finishing.values()] if self._may_go() else []
            if requests:
                self._finishing = {}
        for request in requests:
            request.reply(Done())

    def _take_over(self) -> None:
        """An earlier coordinator died within a save: that one is over; what it has written whole exists."""
        saves = self._job.membership.state.saves
        self._tell_all(EndSave(saves.open))
        found = adopt(saves.open_folder, saves.token, self._job.event)
        with self._job.lock:
            if found is not None:
                saves.last, saves.num_saved = found, saves.num_saved + 1
                self._job.event(f"the coordinator was away; {found.name} was whole already")
            elif self._is_on:
                self._want("the coordinator was away in the middle of one")
            saves.open, saves.open_folder = 0, ""
            self._is_taking_over = False
            self._job.try_keep()
        if found is not None:  # what comes after a save was not done yet
            threading.Thread(target=self._writer.tidy, args=(found,), name="tidy", daemon=True).start()

    def _begin(self, now: float) -> UnderWay | None:
        """Under the lock. Its number is kept: whoever comes after this coordinator ends it."""
        saves = self._job.membership.state.saves
        wanted = self._wanted or Wanted("a regular one", [], now)
        saves.num_begun += 1
        saves.open = saves.num_begun
        self._job.keep()
        self._wanted = None
        self._under_way = UnderWay(saves.open, wanted, now, self._job.membership.chief)
        return self._under_way

    def _expect(self, under_way: UnderWay) -> None:
        with self._job.lock:
            names = self._job.membership.workers()
            endpoints = {name: self._job.endpoints[name] for name in names if name in self._job.endpoints}
        under_way.expect(endpoints, self._job.wake_reconfigurer)

    def _askers(self, now: float) -> tuple[Wanted, list[str]] | None:
        """Under the lock: a save whose askers are not to wait any longer, and for whom they would."""
        if not policy_of(self._job.config).in_rounds:
            return None
        wanted, under_way = self._wanted, self._under_way
        if under_way is not None and not under_way.is_cut:
            wanted, since, waiting = under_way.wanted, under_way.began, under_way.waiting
        elif wanted is not None:
            asked = {request.peer.name for request in wanted.requests} | self._job.membership.finishing
            since, waiting = wanted.since, [name for name in self._job.membership.workers() if name not in asked]
        return (wanted, waiting) if wanted is not None and wanted.has_askers(waiting, now - since) else None

    # -- the cut ------------------------------------------------------------------------------------------

    def _cut(self, under_way: UnderWay) -> None:
        with self._job.lock:
            if not self._may_begin():
                return
            primaries = {replica_set.primary for replica_set in self._job.membership.state.replica_sets.values()}
            # Who asks from now on has a commit behind it that may not be in this cut: it gets the next one.
            self._registration.hold()
            under_way.is_cut = True
            under_way.cut_at = time.monotonic()
        cut = Cut(under_way.number, primaries, under_way.cut_at + CUT_SECONDS, self._noted(under_way))
        try:
            taken = find_level(self._job, self._calls, cut)
        except SynclineError as error:
            self._try_again(under_way, primaries, str(error))
            return
        finally:
            self._registration.release()
        if taken is None:
            self._try_again(under_way, primaries, "", is_urgent=True)
            return
        under_way.is_marked = True
        under_way.wanted.on_cut()
        if under_way.wanted.is_final and not under_way.wanted.turn and self._is_saved(taken):
            self._is_done(under_way, None)
            return
        threading.Thread(target=self._write, args=(under_way, taken), name="save", daemon=True).start()

    def _noted(self, under_way: UnderWay) -> dict[Identity, Noted]:
        """Where workers' boundaries are; the last try takes any place: a script may do otherwise than before."""
        if under_way.wanted.num_tries + 1 >= MOST_TRIES:
            return {}
        answers = {name: call.answer for name, call in under_way.expects.items()}
        with self._job.lock:
            members = self._job.membership.state.members
            return {
                (name, members[name].incarnation): answer
                for name, answer in answers.items()
                if isinstance(answer, Noted) and name in members
            }

    def _is_saved(self, taken: Taken) -> bool:
        """Whether nothing has happened since the last one. Cut into other slices, versions may add up to the same."""
        newest, now = self._job.membership.state.saves.newest, (self._writer.root, taken.num_updates, taken.versions)
        return newest is not None and (newest.root, newest.num_updates, newest.versions) == now

    def _try_again(
        self, under_way: UnderWay, servers: Sequence[str] | set[str], reason: str, *, is_urgent: bool = False
    ) -> None:
        """This try is over, and commits go on; the next one has another number."""
        self._tell_all(OpenSnapshotBarrier(under_way.number), servers)
        self._tell_all(EndSave(under_way.number))
        wanted = under_way.wanted
        if under_way.is_marked:
            wanted.turn, wanted.on_cut = 0, lambda: None  # the workers have gone on
        wanted.num_tries += not is_urgent
        if wanted.num_tries >= MOST_TRIES:
            self._is_done(under_way, StoreError(f"after {MOST_TRIES} tries: {reason}"))
            return
        if reason:
            self._job.log_line(f"a save is tried again: {reason}")
        with self._job.lock:
            wanted.not_before = time.monotonic() + (0.1 if is_urgent else AGAIN_SECONDS)
            self._under_way = None
            later, self._wanted = self._wanted, wanted
            if later is not None:
                wanted.join(later)

    # -- in the thread of the save ------------------------------------------------------------------------

    def _write(self, under_way: UnderWay, taken: Taken) -> None:
        asked = [name for name, call in under_way.expects.items() if isinstance(call.answer, Noted | Done)]
        try:
            made = self._writer.write(taken, asked, under_way.chief, under_way.wanted.turn)
        except ConnectionLost as error:
            self._try_again(under_way, taken.servers, str(error))
        except SynclineError as error:
            self._is_done(under_way, error)
        except Exception as error:  # a bug of ours costs the save, not the job
            self._is_done(under_way, StoreError(f"{type(error).__name__}: {error}"))
            raise
        else:
            try:
                self._writer.tidy(made, waits=under_way.wanted.is_final)
            finally:
                self._is_done(under_way, None, made, taken.gate_seconds)

    def _is_done(
        self,
        under_way: UnderWay,
        error: SynclineError | None,
        made: Checkpoint | None = None,
        gate_seconds: float = 0.0,
    ) -> None:
        """The save is made, or given up. Said, counted, and answered to whoever asked for it."""
        self._tell_all(EndSave(under_way.number))
        wanted = under_way.wanted
        if not under_way.is_marked:
            wanted.on_cut()
        with self._job.lock:
            saves = self._job.membership.state.saves
            if error is not None:
                saves.num_failed, saves.failure = saves.num_failed + 1, str(error)
                self._job.event(f"a save was given up ({wanted.reason}): {error}; the job goes on")
            elif made is not None:
                saves.last, saves.num_saved = made, saves.num_saved + 1
                passed, gate_ms = time.monotonic() - under_way.cut_at, 1000 * gate_seconds
                self._job.event(
                    f"saved {made.name}: {size(made.num_bytes)} in {passed:.1f} s; "
                    f"the gate was closed for {gate_ms:.{0 if gate_ms >= 10 else 1}f} ms ({wanted.reason})"
                )
            saves.open, saves.open_folder = 0, ""
            self._job.try_keep()
            self._has_ended |= wanted.is_final
            self._under_way = None
            newest = saves.newest
            reached = made.step if made is not None else self._job.step()
            self._count_from(time.monotonic(), reached)
        for request in wanted.requests:
            if error is not None or newest is None:
                request.refuse(error or StoreError("nothing was saved"))
            else:
                request.reply(Saved(newest.name, newest.step))
        self._job.wake_reconfigurer()

    def _tell_all(self, message: Message, names: Sequence[str] | set[str] | None = None) -> None:
        with self._job.lock:
            known = self._job.endpoints
            endpoints = [known[name] for name in (known if names is None else names) if name in known]
        for endpoint in endpoints:
            endpoint.mention(message)

    def close(self) -> None:
        self._writer.close()
