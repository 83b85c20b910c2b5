"""The launcher: starts the roles, and again those that die; forwards their output and signals; exits with the job's
verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from syncline.core.wire.checkpoints import Saved
from syncline.core.wire.control import Died, Standings
from syncline.errors import SynclineError
from syncline.launch import lifeline
from syncline.launch.engine import Engine
from syncline.launch.folder import JOURNAL
from syncline.launch.forkserver import ForkServer
from syncline.launch.lives import Life, Lives, Screen
from syncline.launch.processes import MemberPlan, MemberProcess, exit_code
from syncline.launch.restarts import EVICTED, Restarts, is_of_the_script, why_not_again
from syncline.launch.summary import finished, lines
from syncline.launch.tally import Tally
from syncline.launch.watching import Watching
from syncline.worker.steps import CANNOT_RESUME, MISUSED

__all__ = ["Launcher", "Screen"]

POLL_SECONDS = 0.05
#: From the first word to end until nothing is left.
STOP_SECONDS = 2.0
#: After a failure, for members to hear of it before they are told to end.
HEAR_SECONDS = 0.5
#: After a good end, for servers and coordinator to end by themselves.
CLOSE_SECONDS = 5.0
#: For a look at how things stood when a member died.
LOOK_SECONDS = 0.5
#: For the servers to settle what of a worker that died counts.
SETTLE_SECONDS = 5.0
#: For a process that was evicted to end by itself: its script hears of it at its next call to the job.
FENCED_SECONDS = 5.0
#: For a coordinator that is away to say whether a worker that ended well has left.
UNSURE_SECONDS = 10.0

#: Makes the plan of one more member: its name, and where the others are.
Grow = Callable[[str, Mapping[str, str]], MemberPlan]


class Launcher:
    """Runs one job to its end, on an engine that starts and ends its members."""

    def __init__(
        self,
        plans: Sequence[MemberPlan],
        screen: Screen,
        watching: Watching,
        *,
        folder: pathlib.Path,
        grow: Grow,
        engine: Engine,
        max_restarts: int = 3,
        fork_server: ForkServer | None = None,
        save: Callable[[str], Saved] | None = None,
        found: Sequence[tuple[MemberPlan, MemberProcess]] | None = None,
        seconds_before: float = 0.0,
    ) -> None:
        """`save`: has the job saved, where it knows where to. `found`: members that an earlier launcher of this job
        has started; this one takes over, `seconds_before` after that one began.
        """
        self._plans, self._screen, self._watching, self._folder = plans, screen, watching, folder
        self._found = found
        self._unfound: dict[str, MemberPlan] = {}  # members that it may have started, and that have not been found
        self._grow, self._save, self._may_restart = grow, save, max_restarts > 0
        self._fork_server = fork_server
        self._lives = Lives(screen, folder, engine, self._unread)
        self._restarts = Restarts(max_restarts)
        self._due: dict[str, tuple[float, MemberPlan, str]] = {}  # to be started again: when, what, why
        self._tally = Tally(time.monotonic() - seconds_before)
        self._unsaid: dict[str, str] = {}  # likewise, what is said of it then, and not before
        self._workers = {plan.name for plan in plans if plan.role == "worker"}  # that we have started
        self._finished: set[str] = set()  # ended well
        self._misused: set[str] = set()  # workers that ended with a ConfigError
        self._given_up: dict[str, tuple[str, int]] = {}  # workers that the job continues without: reason, exit code
        self._own_mistakes: dict[str, tuple[str, int]] = {}  # workers that ended by their script, the first first
        self._codes: dict[str, int] = {}
        self._standings: Standings | None = None
        self._incarnations: dict[str, int] = {}  # the last known of each member
        self._has_stepped = False
        self._is_fresh = False  # whether the coordinator answered when it was last asked
        self._unsure: dict[str, tuple[Life, float]] = {}
        self._num_scalings = 0
        self._wanted = {role: sum(plan.role == role for plan in plans) for role in ("worker", "server")}
        self._signal: int | None = None
        self._num_signals = 0
        self._failure: tuple[str, str, int] | None = None  # member, reason, exit code

    def run(self) -> int:
        """Starts everything and returns the exit code for the job."""
        with self._signals():
            self._watching.start()
            try:
                if self._found is None:
                    self._begin_all()
                else:
                    self._take_over(self._found)
                self._watch()
            finally:
                self._stop_all()
        return self._conclude()

    def _say(self, text: str) -> None:
        self._screen.line("launcher", f"syncline: {text}")

    def _begin_all(self) -> None:
        for plan in self._plans:
            if self._signal is None:
                self._lives.begin(plan)

    def _take_over(self, found: Sequence[tuple[MemberPlan, MemberProcess]]) -> None:
        """Those that have ended meanwhile are deaths, or good ends, like any other."""
        for plan, process in found:
            self._lives.adopt(plan, process)
        names = {plan.name for plan, _ in found}
        self._unfound = {plan.name: plan for plan in self._plans if plan.name not in names}
        if "coordinator" in self._unfound:
            self._see_unfound("coordinator")
        names |= {plan.name for plan in self._plans}
        self._workers = {name for name in names if name.startswith("worker-")}
        self._wanted = {role: sum(name.startswith(f"{role}-") for name in names) for role in ("worker", "server")}
        self._look_now()  # who counts, and since when

    def _see_unfound(self, name: str) -> None:
        """This member was lost with its host, or never started."""
        plan, reason = self._unfound.pop(name), "was lost while there was no launcher"
        if not self._may_restart:
            self._fail(name, reason, 1)
            return
        self._say(f"{name} {reason}; starts again at once")
        self._tally.died(name, reason, time.monotonic(), comes_back=True)
        self._due[name] = (time.monotonic(), plan, reason)
        if name != "coordinator":
            self._watching.tell(Died(name, reason))

    # -- while it runs ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while self._signal is None and self._failure is None:
            for standings in self._watching.take():
                self._learn(standings)
            self._reap()
            if self._is_over():
                return
            self._start_due()
            self._end_fenced()
            time.sleep(POLL_SECONDS)

    def _learn(self, standings: Standings) -> None:
        """What the coordinator says: who lives, who was of use, how many there are to be, how it ended."""
        if self._found is not None and self._standings is None:
            self._num_scalings = standings.num_scalings
            for name in list(self._unfound):
                if name in standings.left:
                    self._unfound.pop(name)
                    self._finished.add(name)
                else:
                    self._see_unfound(name)
        self._standings = standings
        self._tally.see(standings, time.monotonic())
        self._screen.progress(standings)
        self._has_stepped |= any(report.step for report in standings.reports.values())
        for name, incarnation in standings.incarnations.items():
            life = self._lives.get(name)
            if life is None or (incarnation <= self._incarnations.get(name, 0) and not life.incarnation):
                continue  # of the life before
            life.incarnation = self._incarnations[name] = incarnation
            life.has_pushed |= name in standings.pushed
            report = standings.reports.get(name)
            if report is not None and report.step:
                life.has_position = report.has_position
            self._has_stepped |= name in standings.pushed and life.plan.role == "worker"
        if standings.verdict and standings.culprit:
            self._note_verdict(standings)
        elif not standings.verdict and standings.formed:
            self._grow_to(standings)

    @property
    def _has_ended(self) -> bool:
        return self._standings is not None and bool(self._standings.verdict)

    def _note_verdict(self, standings: Standings) -> None:
        """The coordinator knows of a failure before a process has ended: give that process a moment."""
        for _ in range(10):
            for life, code in self._lives.take_ended():
                self._codes[life.plan.name] = 1 if code == MISUSED else code
            if standings.culprit in self._codes:
                break
            time.sleep(POLL_SECONDS)
        code = exit_code(self._codes.get(standings.culprit, 1)) or 1
        self._failure = (standings.culprit, standings.verdict, code)

    def _is_over(self) -> bool:
        if self._failure is not None:
            return True
        out = {life.plan.name for life in self._lives.values() if self._has_ended and self._is_out(life)}
        if self._workers <= self._finished | self._given_up.keys() | out:
            return not self._others_at_work()
        return not self._lives.values() and not self._due  # those that have ended are seen first

    def _others_at_work(self) -> bool:
        """Workers that were started elsewhere, by the job file; the job is theirs too."""
        if self._standings is None or self._has_ended:
            return False
        self._look_now()
        names = self._standings.incarnations if not self._has_ended else ()
        return any(name.startswith("worker-") and name not in self._finished for name in names)

    def _is_out(self, life: Life) -> bool:
        """Whether the coordinator counts this life no longer: it was evicted, whether it knows or not."""
        name, standings = life.plan.name, self._standings
        if standings is None or not standings.formed or not life.incarnation or name in standings.left:
            return False
        return standings.incarnations.get(name) != life.incarnation

    def _look_now(self) -> None:
        self._is_fresh = "coordinator" in self._lives and self._watching.look_now(LOOK_SECONDS)
        if self._is_fresh:
            for standings in self._watching.take():
                self._learn(standings)

    # -- deaths -------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        ended = self._lives.take_ended()
        self._codes |= {life.plan.name: 1 if code == MISUSED else code for life, code in ended}
        if ended:
            self._look_now()
        for life, code in ended:
            if self._failure is None:
                self._see_end(life, code)
        if self._unsure and self._failure is None:
            self._look_at_unsure()

    def _see_end(self, life: Life, code: int) -> None:
        name, role = life.plan.name, life.plan.role
        if code == EVICTED and self._is_fresh and life.incarnation and not self._is_out(life):
            code = 1  # the script has a number of its own that means something else to us
        reason, left = life.describe_end(code), self._has_left(name)
        if code == CANNOT_RESUME and not life.plan.starts_again:
            code = 1  # a number of the script's own
        if role == "worker" and code == CANNOT_RESUME:
            self._go_on_without(name, "could not go on after it was started again", 1)  # it has said why
            return
        if role == "worker" and code == MISUSED:
            code, reason = 1, life.describe_end(1)
            self._misused.add(name)
        counts = is_of_the_script(code) and not self._may_restart  # however soon the coordinator saw it go
        if role == "worker" and self._has_ended and self._is_out(life) and not counts:
            self._finished.add(name)
            self._say(f"{name} {reason}; the job continued and ended without it")
            self._tally.died(name, reason, time.monotonic(), comes_back=False)
        elif code == 0 and (role != "worker" or left):
            self._finished.add(name)  # a server has left, or the job is over
        elif code == 0 and not self._is_fresh and name not in self._unsure:
            self._unsure[name] = (life, time.monotonic() + UNSURE_SECONDS)  # the coordinator may know better, soon
        elif code == 0:
            self._fail(name, "ended without having joined the job; does the script call syncline.init()?", 1)
        elif self._has_ended and (role != "worker" or not is_of_the_script(code)):
            self._finished.add(name)  # the job is over: who falls now takes nothing with it
            self._say(f"{name} {reason} after the end of the job")
        elif role == "worker" and self._standings and left and not life.had_left and not is_of_the_script(code):
            self._finished.add(name)  # it has left, and falls on its way out
            self._say(f"{name} {reason} after it had left")
            self._watching.tell(Died(name, reason, comes_back=False, ends_job=False))  # its server was there still
        elif code == -signal.SIGTERM and role != "coordinator":
            self._finished.add(name)  # it was told to go, at once
            self._say(f"{name} {reason}; it is not restarted")
            self._tally.died(name, reason, time.monotonic(), comes_back=False)
            self._watching.tell(Died(name, reason, comes_back=False, ends_job=False))
        elif self._has_ended or (left and role == "worker" and self._standings and not life.had_left):
            self._fail(name, reason, exit_code(code))
        elif self._standings is not None and name in self._standings.retiring:
            self._finished.add(name)  # it was to go anyway: the coordinator sees its connection end
            self._say(f"{name} {reason} while it was leaving")
        else:
            self._see_death(life, code, reason)

    def _has_left(self, name: str) -> bool:
        """By the coordinator's word; or it has come to a good end before it was ever looked at."""
        if self._standings is None:
            return self._codes.get("coordinator") == 0
        return name in self._standings.left

    def _look_at_unsure(self) -> None:
        """Workers that ended well while no coordinator could say that they have left."""
        for name, (life, until) in list(self._unsure.items()):
            if self._has_left(name) or self._has_ended or time.monotonic() > until:
                self._see_end(life, 0)
                del self._unsure[name]

    def _see_death(self, life: Life, code: int, reason: str) -> None:
        name = life.plan.name
        if life.plan.role == "worker" and is_of_the_script(code):
            self._own_mistakes.setdefault(name, (reason, code))
            if not self._has_stepped and self._workers <= self._own_mistakes.keys():
                first, (reason, code) = next(iter(self._own_mistakes.items()))
                self._fail(first, reason, exit_code(code))  # trying again would not help
                return
        if name in self._misused and self._may_restart:
            why = f"{name} {reason}; it is not restarted, since the same would happen again"
            self._go_on_without(name, reason, exit_code(code), f"{why}. The job goes on without it", verdict=why)
            return
        if life.plan.role == "worker" and self._may_restart and (why := self._why_not_again(life, reason)):
            self._go_on_without(name, reason, exit_code(code), why)
            return
        again = self._restarts.died(name, life.has_pushed, time.monotonic(), settled=self._settled(name))
        if not again.starts_again and self._may_restart and self._has_pushed_at_last(name, reason):
            again = self._restarts.died(name, True, time.monotonic(), settled=self._settled(name))
        if not again.starts_again:
            told = again.describe(name, reason)
            if again.most and life.plan.starts_again and is_of_the_script(code) and self._has_stepped:
                line = f"{told}; the job continues without it"
                self._go_on_without(name, reason, exit_code(code), line, verdict=told)
            else:
                self._fail(name, reason, exit_code(code), told)
            return
        if self._signal is not None:
            return  # the job ends, and no member starts again
        if life.plan.role == "worker" and is_of_the_script(code) and not self._has_stepped:
            # The same may happen to the others in this moment, and end the job.
            self._unsaid[name] = dataclasses.replace(again, pause_seconds=0.0).describe(name, reason)
        else:
            self._say(again.describe(name, reason))
        self._tally.died(name, reason, time.monotonic(), comes_back=True)
        self._due[name] = (time.monotonic() + again.pause_seconds, life.plan, reason)
        if name != "coordinator":
            self._watching.tell(Died(name, reason))

    def _why_not_again(self, life: Life, reason: str) -> str:
        return why_not_again(
            life.plan.name,
            reason,
            has_position=life.has_position,
            others_have_finished=self._others_have_finished(life.plan.name),
        )

    def _others_have_finished(self, name: str, *, or_are_through: bool = False) -> bool:
        """Whether there is nothing left to do for this worker. `or_are_through`: also by the others' word that they
        have come to the end of the run; a script may begin another one."""
        others, standings = self._workers - self._given_up.keys() - {name}, self._standings
        if standings is not None and standings.stop:
            return bool(others)  # training is over by a rule
        reports = standings.reports if standings is not None else {}
        through = {one for one in others if or_are_through and one in reports and reports[one].is_through}
        return bool(others) and others <= self._finished | through

    def _settled(self, name: str) -> int:
        """Commits that count of a worker's lives that are over, as far as the coordinator knows."""
        return self._standings.settled.get(name, 0) if self._standings is not None else 0

    def _has_pushed_at_last(self, name: str, reason: str) -> bool:
        """Whether the life that has just ended has pushed, when its last beat was too early to say so."""
        if self._standings is None or not name.startswith("worker-"):
            return False
        self._watching.tell(Died(name, reason), LOOK_SECONDS)
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and not self._restarts.has_pushed(name, self._settled(name)):
            self._look_now()
            if self._is_fresh and name not in self._standings.unsettled:
                break
            time.sleep(POLL_SECONDS)
        return self._restarts.has_pushed(name, self._settled(name))

    def _go_on_without(self, name: str, reason: str, code: int, line: str = "", verdict: str = "") -> None:
        """This worker is not restarted. The job goes on while there are others, else it fails with `verdict`."""
        self._given_up[name] = (reason, code)
        others = [other for other in (*self._lives.names("worker"), *self._due) if other != name]
        if not any(other.startswith("worker-") for other in others) and not self._is_chief_done:
            self._fail(name, reason, code, verdict or line or f"{name} {reason}, and no other worker is left")
            return
        if line:
            self._say(line)
        self._tally.died(name, reason, time.monotonic(), comes_back=False)
        self._watching.tell(Died(name, reason, comes_back=False, ends_job=False))

    @property
    def _is_chief_done(self) -> bool:
        return self._standings is not None and self._standings.is_chief_done

    def _fail(self, name: str, reason: str, code: int, verdict: str = "") -> None:
        """This is the verdict; everyone is told who died, and how."""
        if self._failure is None:
            self._failure = (name, verdict or f"{name} {reason}", code or 1)
            if name != "coordinator":
                self._watching.tell(Died(name, reason, comes_back=False), 1.0)

    # -- starting again, and more -------------------------------------------------------------------------

    def _start_due(self) -> None:
        """A member starts again after its pause, and not before the coordinator has heard of its death."""
        for name, (when, plan, why) in list(self._due.items()):
            if time.monotonic() < when or not self._watching.is_told(name) or self._has_ended:
                continue
            del self._due[name]
            if plan.role == "worker" and self._others_have_finished(name, or_are_through=True):
                line = why_not_again(name, why, has_position=True, others_have_finished=True)
                self._go_on_without(name, why, 1, line)
                continue
            if line := self._unsaid.pop(name, ""):
                self._say(line)
            begun = self._watching.has_answered or (self._folder / JOURNAL).exists()
            resumes = plan.role == "coordinator" and begun
            self._tally.starts_again(name)
            self._lives.begin(msgspec.structs.replace(plan, resumes=resumes, starts_again=True), why)
        if self._has_ended:
            self._due.clear()

    def _grow_to(self, standings: Standings) -> None:
        """More are wanted: the next free names. When fewer are, the coordinator retires some itself."""
        for role, wanted in standings.wanted.items():
            before, self._wanted[role] = self._wanted.get(role, wanted), wanted
            if wanted <= before and standings.num_scalings == self._num_scalings:
                continue
            where = {life.plan.name: life.plan.host for life in self._lives.values()}
            where |= {name: plan.host for name, (_, plan, _) in self._due.items()}
            taken = {name for name in (*where, *standings.incarnations) if name.startswith(f"{role}-")}
            staying = taken - set(standings.retiring)
            free = (name for k in range(1 << 16) if (name := f"{role}-{k}") not in taken)
            for _ in range(wanted - len(staying)):
                plan = self._grow(next(free), where)
                where[plan.name] = plan.host
                self._finished.discard(plan.name)
                self._misused.discard(plan.name)
                if role == "worker":
                    self._workers.add(plan.name)
                self._say(f"{plan.name} starts on host {plan.host}")
                self._lives.begin(plan).had_left = plan.name in standings.left
        self._num_scalings = standings.num_scalings

    def _end_fenced(self) -> None:
        """Who was evicted and does not hear of it, because it hangs or is stopped, is ended here."""
        now = time.monotonic()
        for life in self._lives.values():
            name = life.plan.name
            if not self._is_out(life):
                life.missing_since = None
            elif life.missing_since is None:
                life.missing_since = now
            elif now - life.missing_since > FENCED_SECONDS:
                self._say(f"{name} was evicted {FENCED_SECONDS:g} s ago and has not ended; the launcher ends it now")
                life.missing_since, life.is_ended_here = now, True
                self._lives.kill(life)

    # -- the end ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the job in order; a second one ends it at once."""

        def handler(number: int, frame: object) -> None:
            self._num_signals += 1
            if self._fork_server is not None:
                self._fork_server.interrupt()  # it may be loading torch, and the launcher waiting for that
            if self._signal is not None:
                self._lives.kill_all()
            self._signal = number

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, old in previous.items():
                signal.signal(number, old)

    def _unread(self) -> None:
        self._signal = self._signal or signal.SIGPIPE  # our output has no reader any more

    def _save_first(self, save: Callable[[str], Saved]) -> None:
        """Saves the job, so that it can be resumed, before it ends. A second signal ends this too."""
        self._say("SIGTERM: the job is saved, then it ends")
        self._lives.tell(lifeline.SAVES)
        told: list[str] = []

        def ask() -> None:
            try:
                told.append(f"saved {save('SIGTERM').name}")
            except (SynclineError, OSError) as error:
                told.append(f"the job is not saved: {error}")

        asking = threading.Thread(target=ask, name="save", daemon=True)
        asking.start()
        while asking.is_alive() and self._num_signals < 2:
            asking.join(POLL_SECONDS)
        self._say(told[0] if told else "the job is not saved: a second signal ends it at once")
        self._lives.tell(lifeline.ENDS)

    def _stop_all(self) -> None:
        went_well = self._signal is None and self._failure is None and not self._due
        is_formed = self._standings is not None and self._standings.formed
        if self._signal == signal.SIGTERM and self._save is not None and is_formed and not self._has_ended:
            self._save_first(self._save)
        if not went_well and "coordinator" in self._lives and is_formed:
            self._watching.look_now(LOOK_SECONDS)  # how far it came
        for standings in self._watching.take():
            self._tally.see(standings, time.monotonic())
        self._watching.stop()
        seconds = CLOSE_SECONDS if went_well else STOP_SECONDS
        self._lives.stop(seconds, asks=not went_well, hear_seconds=HEAR_SECONDS if self._failure else 0.0)
        self._watching.close()

    def _conclude(self) -> int:
        name = ""
        if self._signal is not None:
            code = 128 + self._signal
            verdict = f"interrupted by {signal.Signals(self._signal).name}; all members have ended"
        elif self._failure is not None:
            name, reason, code = self._failure
            log = self._folder / f"{name}.log"
            where = f" (log: {log})" if log.exists() else ""
            verdict = f"the job has failed: {reason}{where}"
        else:
            num_well = sum(self._codes.get(worker) == 0 for worker in self._workers)
            code, verdict = 0, finished(num_well, len(self._workers))
        facts = self._tally.facts(verdict, str(self._folder), time.monotonic(), culprit=name)
        self._screen.verdict("\n".join(lines(facts)))
        return code
