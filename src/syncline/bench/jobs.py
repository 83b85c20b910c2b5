"""Starts the jobs that measure the rows, as `syncline run` starts them, and collects their figures."""

from __future__ import annotations

import collections
import tempfile

import msgspec

from syncline import config as configuration
from syncline.bench import links, script
from syncline.bench.machine import Others
from syncline.bench.rows import RowGroup, RowOutcome
from syncline.core.wire.control import Standings
from syncline.errors import SynclineError
from syncline.launch.hosts import settle_workers
from syncline.launch.running import Script, advertised, listen, run_job
from syncline.net.tcp import is_loopback

#: Reserved for documentation (RFC 5737): the way there is the default route, and nothing is sent.
_ELSEWHERE = "192.0.2.1"
#: On a busy machine a member that is silent for some seconds is slow, not dead.
_FIXED = {"servers": 1, "max_restarts": 0, "deadline_seconds": 60.0, "longest_deadline_seconds": 120.0}
QUICK = script.Effort(num_pairs=5, turn_seconds=0.05, row_seconds=5.0)


class _Screen:
    """Collects figures, and keeps the last lines for a job that fails."""

    def __init__(self) -> None:
        self.figures: dict[str, script.MeasuredFigures] = {}
        self.lines: collections.deque[str] = collections.deque(maxlen=20)
        self.reason = ""

    def line(self, member: str, text: str) -> None:
        mark, found, figures = text.partition(script.MARK)
        if found and not mark:
            made = msgspec.json.decode(figures, type=script.MeasuredFigures)
            self.figures[made.row] = made
        else:
            self.lines.append(f"{member} | {text}")

    def progress(self, standings: Standings) -> None:
        pass

    def verdict(self, text: str) -> None:
        self.reason = text


def measure(group: RowGroup, effort: script.Effort) -> list[RowOutcome]:
    """Every row of the group; rows that the job did not get to have its error."""
    settings = dict(group.settings)
    if group.is_tls and not settings.get("hosts"):  # on loopback connections are in the clear
        address = links.address_towards(_ELSEWHERE)
        if not address or is_loopback(address):
            return [RowOutcome(row, not_measured="needs a network address besides loopback") for row in group.rows]
        settings["bind"] = address
    screen, others = _Screen(), Others()
    try:
        error = _run(group, settings, effort, screen)
    except SynclineError as failure:
        error = f"{type(failure).__name__}: {failure}"
    share, outcomes = others.share(), []
    for row in group.rows:
        if figures := screen.figures.get(row.name):
            outcomes.append(RowOutcome(row, figures.ours, figures.floor, others_share=share))
        else:
            outcomes.append(RowOutcome(row, error=error or "the job ended without this row's figures"))
    return outcomes


def _run(group: RowGroup, settings: dict[str, object], effort: script.Effort, screen: _Screen) -> str:
    """One job; why it failed, or nothing."""
    with tempfile.TemporaryDirectory(prefix="syncline-") as runs:
        given = settle_workers({**_FIXED, "name": "bench", "runs": runs, **settings})
        config = configuration.resolve(configuration.check_known(given, "bench"))
        with listen(config) as sock:
            coordinator = advertised(sock, config)
        given = {**given, "bind": given.get("bind") or coordinator}
        told = script.Instruction(
            rows={row.name: row.num_bytes for row in group.rows},
            coordinator=coordinator,
            is_tls=group.is_tls,
            on_one_host=not config.hosts,
            effort=effort,
        )
        module = Script(path=script.__name__, is_module=True, arguments=[msgspec.json.encode(told).decode()])
        code = run_job(given, configuration.resolve(given), module, screen)
    if not code:
        return ""
    last = "".join(f"\n  {line}" for line in screen.lines)
    return f"{screen.reason or f'the job ended with exit code {code}'}{last}"
