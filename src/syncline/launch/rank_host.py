"""The process beside rank 0 with a job's coordinator and servers; torchrun, mpirun or srun has started the workers.

It restarts nothing, since such a launcher ends or restarts all ranks together: the death of any member ends the job,
with a verdict that names it, and the other ranks hear of it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator

import msgspec

from syncline import config as configuration
from syncline.core.verdicts import TellsVerdicts
from syncline.core.wire.control import Died, Standings
from syncline.errors import ConfigError, SynclineError
from syncline.launch.engine import Processes
from syncline.launch.folder import found_by_others, hold
from syncline.launch.jobfile import JobFile
from syncline.launch.lives import Lives
from syncline.launch.processes import MemberPlan, exit_code
from syncline.launch.rendezvous import remove_token, write_token
from syncline.launch.summary import finished, lines
from syncline.launch.tally import Tally
from syncline.launch.watching import Watching, ask_to_save

POLL_SECONDS = 0.05
#: For the job of an earlier start to let go of its folder.
FOLDER_SECONDS = 10.0
#: For the others to hear of a failure; for members to end after it; and after a good end.
HEAR_SECONDS, STOP_SECONDS, CLOSE_SECONDS = 0.5, 2.0, 5.0
#: For the coordinator to be told of a death.
TELL_SECONDS = 1.0
#: After rank 0 is gone: for the deaths of others before it to be seen, beside the time for which the coordinator only
#: suspects them; and more than all that follows takes.
LOST_SECONDS, MOST_SUSPECT_SECONDS, END_SECONDS = 1.0, 3.0, 2.0


class RankHostPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 hands to this process over its standard input."""

    file: JobFile
    host: str
    listen_fd: int
    page_fd: int | None = None  #: the socket of the web page
    page_code: str = ""  #: opens the page once
    num_servers: int
    launcher: str  #: torchrun, mpirun, srun
    restarts: str  #: what that does when a rank dies, in words
    secret: str  #: from which the file's id and token follow
    token_path: str = ""  #: where the other ranks wait for the secret; empty: they have it
    script: str = ""
    is_module: bool = False


class _Output:
    """Shows the lines of servers and coordinator on the output of rank 0."""

    def line(self, member: str, text: str) -> None:
        self._write(text if text.startswith("syncline: ") else f"{member} | {text}")

    def progress(self, standings: Standings) -> None:
        """Ranks print what they want to."""

    def verdict(self, text: str) -> None:
        self._write(text)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the launcher's pipe is closed: the logs have it
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


class RankHost:
    """Runs the coordinator and the servers of one job to its end."""

    def __init__(self, plan: RankHostPlan, folder: pathlib.Path) -> None:
        self._plan, self._folder, self._screen = plan, folder, _Output()
        self._watching = Watching(plan.file)
        self._lives = Lives(self._screen, folder, Processes(), lambda: None)
        self._tally = Tally(time.monotonic())
        self._verdicts = TellsVerdicts()
        self._standings: Standings | None = None
        self._failure: tuple[str, str, int] | None = None  # member, reason, exit code
        self._parent, self._is_told_to_end = os.getppid(), False
        self._is_published = False
        self._lost_rank_0 = threading.Event()
        self._lost_at: float | None = None
        suspect_seconds = configuration.resolve(plan.file.given).suspect_seconds
        self._lost_seconds = LOST_SECONDS + min(suspect_seconds, MOST_SUSPECT_SECONDS)

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._told_to_end)  # rank 0 passes it on
        threading.Thread(target=self._watch_rank_0, name="rank 0", daemon=True).start()
        self._watching.start()
        try:
            for plan in self._plans():
                self._lives.begin(plan)
            while self._failure is None and not self._is_over():
                for standings in self._watching.take():
                    self._learn(standings)
                self._reap()
                self._publish()
                if self._has_lost_rank_0():
                    self._fail("worker-0", "(rank 0) is gone")
                if self._is_told_to_end and self._failure is None and not self._is_over():
                    self._fail("worker-0", f"(rank 0) was ended by SIGTERM; {self._save()}")
                time.sleep(POLL_SECONDS)
        finally:
            self._stop()
        return self._conclude()

    def _plans(self) -> Iterator[MemberPlan]:
        plan = self._plan
        yield MemberPlan(
            role="coordinator",
            name="coordinator",
            host="local",
            file=plan.file,
            listen_fd=plan.listen_fd,
            page_fd=plan.page_fd,
            page_code=plan.page_code,
        )
        for number in range(plan.num_servers):
            yield MemberPlan(
                role="server",
                name=f"server-{number}",
                host=plan.host,
                file=plan.file,
                script=plan.script,
                is_module=plan.is_module,
                folder=os.getcwd(),
            )

    def _has_lost_rank_0(self) -> bool:
        """Others may have died before it, and are named then. A fork of rank 0 may hold its pipe to us open."""
        if self._lost_rank_0.is_set() or os.getppid() != self._parent:
            self._lost_at = self._lost_at or time.monotonic()
        return self._lost_at is not None and time.monotonic() > self._lost_at + self._lost_seconds

    def _watch_rank_0(self) -> None:
        """Rank 0 holds the other end of our standard input. Without it this process ends soon, whatever it does."""
        while os.read(0, 1 << 10):
            pass
        self._lost_rank_0.set()
        time.sleep(self._lost_seconds + HEAR_SECONDS + STOP_SECONDS + TELL_SECONDS + END_SECONDS)
        os._exit(137)

    def _publish(self) -> None:
        """The other ranks get the secret when the coordinator answers: before that they would dial in vain."""
        if self._plan.token_path and not self._is_published and self._watching.has_answered:
            self._is_published = True
            write_token(pathlib.Path(self._plan.token_path), self._plan.secret.encode())

    def _is_over(self) -> bool:
        return self._standings is not None and bool(self._standings.verdict)

    def _learn(self, standings: Standings) -> None:
        before, self._standings = self._standings, standings
        self._tally.see(standings, time.monotonic())
        for told in self._verdicts.new(standings.verdicts):
            self._screen.line("coordinator", f"syncline: {told}")
        if standings.verdict:
            if standings.culprit:
                self._failure = (standings.culprit, standings.verdict, 1)
            return
        gone = (before.incarnations.keys() if before else set()) - standings.incarnations.keys() - {*standings.left}
        if gone:
            first, *others = sorted(map(_rank_of, sorted(gone)))
            told = f", and so {'is' if len(others) == 1 else 'are'} {', '.join(others)}" if others else ""
            self._fail(sorted(gone)[0], f"({first}) is gone{told}")

    def _reap(self) -> None:
        for life, code in self._lives.take_ended():
            if self._is_over() or (code == 0 and life.plan.role == "server"):
                continue
            if code == 0 and self._standings is not None:  # the coordinator: all have left
                self._watching.stop()
                self._standings = msgspec.structs.replace(self._standings, verdict="all workers have finished")
                continue
            self._fail(life.plan.name, life.describe_end(code), exit_code(code))

    def _told_to_end(self, number: int, frame: object) -> None:
        self._is_told_to_end = True

    def _save(self) -> str:
        """Saves a job that is ended as a whole, where it has a folder for that; in words."""
        config = configuration.resolve(self._plan.file.given)
        if not config.checkpoint or self._standings is None or not self._standings.formed:
            return "nothing is saved"
        try:
            return f"saved {ask_to_save(self._plan.file, config.save_seconds, 'SIGTERM').name}"
        except (SynclineError, OSError) as error:
            return f"the job is not saved: {error}"

    def _fail(self, name: str, reason: str, code: int = 1) -> None:
        """Such a death ends the job; all ranks hear of it."""
        if self._failure is not None:
            return
        told = f"{reason}; {self._plan.restarts}"
        self._failure = (name, f"{name} {told}", code or 1)
        if name != "coordinator":
            self._watching.tell(Died(name, told, comes_back=False), TELL_SECONDS)

    def _stop(self) -> None:
        if self._failure is not None:
            self._watching.look_now(HEAR_SECONDS)
        for standings in self._watching.take():
            self._tally.see(standings, time.monotonic())
        self._watching.stop()
        failed = self._failure is not None
        self._lives.stop(
            STOP_SECONDS if failed else CLOSE_SECONDS, asks=failed, hear_seconds=HEAR_SECONDS if failed else 0.0
        )
        self._watching.close()
        if self._is_published:
            remove_token(pathlib.Path(self._plan.token_path), self._plan.secret.encode())

    def _conclude(self) -> int:
        num_workers, name, code = int(self._plan.file.given["workers"]), "", 0
        if self._failure is not None:
            name, reason, code = self._failure
            config = configuration.resolve(self._plan.file.given)
            goes_on = f"the same command goes on from {config.checkpoint}" if config.checkpoint else (
                "with --checkpoint DIR, or checkpoint in syncline.toml, the same command would go on from there"
            )  # fmt: skip
            verdict = f"the job has failed: {reason}; {goes_on}"
        else:
            verdict = finished(num_workers, num_workers)
        facts = self._tally.facts(verdict, str(self._folder), time.monotonic(), culprit=name)
        self._screen.verdict("\n".join(lines(facts)))
        return code


def _rank_of(name: str) -> str:
    return f"rank {name.rpartition('-')[2]}" if name.startswith("worker-") else name


@contextlib.contextmanager
def _folder_of(file: JobFile) -> Iterator[pathlib.Path]:
    """The job's folder; where an earlier start of the same name is ending, it is waited for."""
    config, until = configuration.resolve(file.given), time.monotonic() + FOLDER_SECONDS
    with contextlib.ExitStack() as stack:
        while True:
            try:
                folder = stack.enter_context(hold(config))
                break
            except ConfigError:
                if time.monotonic() > until:
                    raise
            time.sleep(POLL_SECONDS)
        stack.enter_context(found_by_others(folder, file))
        yield folder


def main() -> int:
    data = b""
    while not data.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return 1
        data += chunk
    plan = msgspec.json.decode(data, type=RankHostPlan)
    configuration.leave_cores()
    try:
        with _folder_of(plan.file) as folder:
            return RankHost(plan, folder).run()
    except SynclineError as error:
        sys.stderr.write(f"syncline: {type(error).__name__}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
