"""The terminal: members' lines, and one live line of progress."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from syncline.cli.standing import duration, epoch_told
from syncline.core.control import Standings
from syncline.core.progress import shares

#: Without a terminal, progress is a plain line now and then.
PLAIN_SECONDS = 10.0
#: Of so many workers each one's share of the samples is shown, of more the least and the largest.
MOST_SHARES = 4


class TerminalScreen:
    """Shows the chief's lines as they are, the others' with their names, and progress below."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, transient=True, refresh_per_second=4)
        self._lock = threading.Lock()
        self._counted_at = 0.0
        self._samples: dict[str, int] = {}  # by worker, as counted then
        self._next_plain = time.monotonic() + PLAIN_SECONDS
        self._rate = 0.0

    def __enter__(self) -> TerminalScreen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def line(self, member: str, text: str) -> None:
        shown = text if member == "worker-0" or text.startswith("syncline: ") else f"{member} | {text}"
        with self._lock:
            if self._console.is_terminal and sys.stdout.isatty():
                self._console.print(Text.from_ansi(shown))  # above the live line
            else:
                sys.stdout.write(shown + "\n")
                sys.stdout.flush()

    def progress(self, standings: Standings) -> None:
        text = self._describe(standings)
        with self._lock:
            if self._console.is_terminal:
                self._live.update(Text(text, style="dim"))
            elif time.monotonic() >= self._next_plain:
                self._next_plain = time.monotonic() + PLAIN_SECONDS
                sys.stdout.write(text + "\n")
                sys.stdout.flush()

    def _describe(self, standings: Standings) -> str:
        if not standings.formed:
            return f"starting: waiting for {', '.join(standings.missing)}"
        reports = standings.reports.values()
        samples = {name: report.samples for name, report in standings.reports.items()}
        self._count(standings.seconds, samples)
        step = max((report.step for report in reports), default=0)
        count = sum(name.startswith("worker-") for name in standings.incarnations)
        workers = "1 worker" if count == 1 else f"{count} workers"
        parts = [f"{self._policy}, {workers}", f"{standings.seconds:.0f} s", f"step {step:,}"]
        newest = max(standings.epochs, key=lambda epoch: (epoch.epoch, epoch.num_samples), default=None)
        if newest is not None:
            left = newest.num_left / self._rate if self._rate else 0.0
            parts.append(epoch_told(newest) + (f", {duration(left)} left" if left else ""))
        if any(samples.values()):
            parts.append(f"{self._rate:,.0f} samples/s")
            parts += _shares_told(shares(samples))
        return " · ".join(parts)

    def _count(self, seconds: float, samples: dict[str, int]) -> None:
        """Samples in a second, once a second. A worker that has started again counts from 0."""
        if seconds - self._counted_at < 1.0:
            return
        before = {name: self._samples.get(name, 0) for name in samples}
        fresh = sum(now - before[name] if now >= before[name] else now for name, now in samples.items())
        self._rate = fresh / (seconds - self._counted_at)
        self._counted_at, self._samples = seconds, samples

    def verdict(self, text: str) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._console.print(Text(f"syncline: {text}"))


def _shares_told(parts: dict[str, float]) -> list[str]:
    """Each worker's part of the samples, where there are several."""
    if len(parts) < 2:
        return []
    if len(parts) > MOST_SHARES:
        return [f"shares {100 * min(parts.values()):.0f} to {100 * max(parts.values()):.0f} %"]
    return [", ".join(f"{name} {100 * part:.0f} %" for name, part in sorted(parts.items()))]
