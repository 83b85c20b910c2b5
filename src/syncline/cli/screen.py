"""The terminal: members' lines and a live progress line."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from syncline.cli.standing import MOST_MISSING, duration
from syncline.core.leasing.progress import epoch_told, shares
from syncline.core.metrics import told
from syncline.core.pipelining.telling import stages_told
from syncline.core.repeats import SameLines
from syncline.core.units import counted
from syncline.core.verdicts import TellsVerdicts
from syncline.core.wire.control import Standings

#: Without a terminal, progress is a plain line now and then.
PLAIN_SECONDS = 10.0
#: A plain line waits until members have been quiet for this long, so as not to split their tables.
QUIET_SECONDS = 2.0
#: A plain line is delayed at most this long by members that write all the time or make no step.
MOST_PLAIN_SECONDS = 60.0
#: Up to this many workers each one's share is shown, beyond it only the least and the largest.
MOST_SHARES = 4
#: Verdicts below the line.
MOST_VERDICTS = 2
#: A smaller lag is usual, in every policy.
LEAST_LAG = 5
#: Metrics shown in the line.
MOST_READINGS = 3


class TerminalScreen:
    """Shows the chief's lines unchanged, the others' with their names, and progress below.

    On a terminal, what a member prints again and again is folded; files and pipes have every line. `quiet`: without
    the launcher's first lines, and without progress. `as_json`: every line is one of JSON.
    """

    def __init__(
        self,
        policy: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet: bool = False,
        as_json: bool = False,
    ) -> None:
        self._policy, self._clock, self._quiet, self._as_json = policy, clock, quiet, as_json
        self._verdicts = TellsVerdicts()
        self._began: float | None = None  # when the job was formed: a restarted coordinator counts from its own start
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        # Lines go to standard output: Live would print them on standard error.
        self._live = Live(
            console=self._console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._is_live = self._console.is_terminal and not _is_pipe() and not quiet and not as_json
        self._same: dict[str, SameLines] = {}  # by member
        self._lock = threading.Lock()
        # since when samples are counted; each worker's count then
        self._last: tuple[float, dict[str, int]] = (0.0, {})
        self._plain_at = self._line_at = clock()  # times of the last plain line and of the last member's line
        self._rate: float | None = None  # unknown
        self._step = 0  # a restarted coordinator does not know it at once

    def __enter__(self) -> TerminalScreen:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._tell_folded(is_over=True)
        if self._is_live:
            self._live.stop()

    def line(self, member: str, text: str) -> None:
        if self._as_json:
            self._write(_json(member=member, text=text))
        elif self._quiet and member == "launcher" and self._began is None:
            return  # what the job is, and where its logs are
        else:
            for one in self._unfolded(member, text):
                self._write(one if member == "worker-0" or one.startswith("syncline: ") else f"{member} | {one}")

    def _unfolded(self, member: str, text: str) -> list[str]:
        """The lines to show for this one. What the launcher says counts each time."""
        if member == "launcher" or not sys.stdout.isatty():
            return [text]
        with self._lock:
            return self._same.setdefault(member, SameLines(member)).add(text, self._clock())

    def _tell_folded(self, *, is_over: bool = False) -> None:
        """How often lines were not shown."""
        with self._lock:
            told = [line for same in self._same.values() for line in same.flush(self._clock(), is_over=is_over)]
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone: the logs have all lines
            for line in told:
                self._write(line)

    def _write(self, shown: str) -> None:
        with self._lock:
            self._line_at = self._clock()
            if self._is_live and sys.stdout.isatty():
                self._console.print(Text.from_ansi(shown))  # above the live line
            else:
                sys.stdout.write(shown + "\n")
                sys.stdout.flush()

    def progress(self, standings: Standings) -> None:
        before = self._step
        text = "" if _is_ending(standings) else self.describe(standings)
        for found in self._verdicts.new(standings.verdicts):
            self.line("coordinator", found if self._as_json else f"syncline: {found}")
        self._tell_folded()
        if self._quiet:
            return
        if self._as_json:
            text = text and _json(progress=self._figures(standings), text=text)
        with self._lock:
            if self._is_live:
                self._show_live(text, self._below(standings) if text else [])
            elif text and self._is_due(has_advanced=self._step > before or not standings.formed):
                self._plain_at = self._clock()
                sys.stdout.write(text + "\n")
                sys.stdout.flush()

    def _show_live(self, text: str, below: Sequence[str] = ()) -> None:
        """Lines as wide as the terminal: a wrapped rest would stay between members' lines."""
        lines = [Text(text, style="dim", no_wrap=True, overflow="ellipsis")]
        lines += [Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in below]
        self._live.update(Group(*lines), refresh=True)

    def _below(self, standings: Standings) -> list[str]:
        """What is worth a line of its own: a long wait, and what makes the job slow."""
        told = [f"waits: {standings.long_wait}"] if standings.long_wait else []
        return told + [verdict.text for verdict in standings.verdicts[:MOST_VERDICTS]]

    def _figures(self, standings: Standings) -> dict[str, object]:
        """For machines: the numbers of the progress line."""
        return {
            "step": self._step,
            "seconds": round(self._clock() - self._began, 3) if self._began is not None else 0.0,
            "samples_per_second": self._rate,
            "workers": _num_workers(standings),
            "lag": standings.lag,
            "metrics": standings.readings,
            "long_wait": standings.long_wait,
        }

    def _is_due(self, *, has_advanced: bool) -> bool:
        """Whether to write a plain line now. After training, members write their results."""
        now = self._clock()
        is_quiet = now - self._line_at >= QUIET_SECONDS
        return now - self._plain_at >= (PLAIN_SECONDS if is_quiet and has_advanced else MOST_PLAIN_SECONDS)

    def describe(self, standings: Standings) -> str:
        if not standings.formed:
            named, more = standings.missing[:MOST_MISSING], len(standings.missing) - MOST_MISSING
            return f"starting: waiting for {', '.join(named)}{f' and {more} more' if more > 0 else ''}"
        now = self._clock()
        if self._began is None:
            self._began = now - standings.seconds
        # Workers that have left are in no share.
        samples = {n: report.samples for n, report in standings.reports.items() if n in standings.incarnations}
        self._measure(now, samples)
        self._step = max(self._step, standings.step)
        num_workers = _num_workers(standings)
        workers = counted(num_workers, "worker") if num_workers else "waiting for a worker to start again"
        parts = [
            f"{standings.policy or self._policy}, {workers}",
            f"{now - self._began:.0f} s",
            f"step {self._step:,}",
        ]
        if standings.lag >= LEAST_LAG:
            parts.append(f"lag {standings.lag:,}")
        newest = max(standings.epochs, key=lambda epoch: (epoch.epoch, epoch.num_samples), default=None)
        if newest is not None:
            left = newest.num_left / self._rate if self._rate and not newest.is_steps else 0.0
            parts.append(epoch_told(newest) + (f", {duration(left)} left" if left else ""))
        if self._rate is not None and not (newest is not None and newest.is_steps):
            parts.append(f"{self._rate:,.0f} samples/s")
            parts += _shares_told(shares(samples))
        if pipelines := stages_told({name: report.stages for name, report in standings.reports.items()}):
            parts.append(pipelines)
        if standings.readings:
            parts.append(told(standings.readings, MOST_READINGS))
        if standings.stop:
            parts.append(f"stopped by {standings.stop}")
        return " · ".join(parts)

    def _measure(self, now: float, samples: dict[str, int]) -> None:
        """Samples per second, over a second; starts over when other workers report, or one restarts."""
        since, before = self._last
        if samples.keys() != before.keys() or any(samples[name] < before[name] for name in samples):
            self._rate, self._last = None, (now, samples)
        elif now - since >= 1.0:
            gained = sum(samples.values()) - sum(before.values())
            self._rate, self._last = gained / (now - since) if any(samples.values()) else None, (now, samples)

    def verdict(self, text: str) -> None:
        if self._as_json:
            self._write(_json(verdict=text))
            return
        if self._is_live:
            with self._lock:
                self._show_live("")
        self._tell_folded(is_over=True)
        try:
            self._write(f"syncline: {text}")
        except (OSError, ValueError):  # standard output is closed, or cannot encode a character
            with self._lock, contextlib.suppress(OSError, ValueError):
                self._console.print(Text(f"syncline: {text}"))


def _json(**told: object) -> str:
    """One line: when, and what."""
    return msgspec.json.encode({"at": round(time.time(), 3), **told}).decode()


def _is_pipe() -> bool:
    """Whether our lines go into a pipe: `tee` shows them on the same terminal as the live line."""
    try:
        return stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # closed, or not a file at all
        return False


def _num_workers(standings: Standings) -> int:
    return sum(name.startswith("worker-") for name in standings.incarnations)


def _is_ending(standings: Standings) -> bool:
    """Whether the final table comes next. A progress line after workers have left would be misleading."""
    return bool(standings.verdict) or (standings.formed and bool(standings.left) and not _num_workers(standings))


def _shares_told(parts: dict[str, float]) -> list[str]:
    """Each worker's share of the samples, if there are several."""
    if len(parts) < 2:
        return []
    if len(parts) > MOST_SHARES:
        return [f"shares {100 * min(parts.values()):.0f} to {100 * max(parts.values()):.0f} %"]
    return [", ".join(f"{name} {100 * part:.0f} %" for name, part in sorted(parts.items()))]
