"""Whom a server waits for, as sent with heartbeats and shown by `why`."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from syncline.core.wire.control import Heartbeat
from syncline.server.commits import Commits
from syncline.server.lease_acks import unconfirmed_here
from syncline.server.slices import HostedSlice
from syncline.stats import Wait

#: A backup that is slower than this is reported.
MOMENT_SECONDS = 0.1


def beat_of(commits: Commits, slots: Collection[HostedSlice]) -> Heartbeat:
    """The server's heartbeat: the workers' clocks and current waits."""
    now = time.monotonic()
    with commits.state_lock:
        clocks = {s.name: s.clock for s in commits.rounds.standings.values() if not s.left}
        updates = max((slot.state.version for slot in slots), default=0)
        waits = [*_rounds(commits, updates + 1, now), *_lags(commits, now)]
    acks, late = unconfirmed_here(slots)
    return Heartbeat(clocks=clocks, waits=[*waits, *_backups(slots, now)], acks=acks, late=late, num_updates=updates)


def _rounds(commits: Commits, step: int, now: float) -> list[Wait]:
    """`step`: of the job. The clocks of workers that were restarted differ from it and from each other."""
    found = []
    missing = commits.rounds.missing()
    oldest = list(commits.rounds.open_commits())
    if missing and oldest:
        there = [commit for commit in oldest if commit.worker not in missing]
        since = min(commit.item.since for commit in there or oldest)
        found.append(Wait("", step, missing, max(0.0, now - since), "round"))
    for work in commits.flow.clipping.works():
        asked = [commit for commit in work.commits if not commit.item.is_fenced]
        if asked and not work.applied and not work.scaled:
            since = min(commit.item.since for commit in asked)
            found.append(Wait("", step, [commit.worker for commit in asked], now - since, "round"))
    votes = commits.flow.ring.missing(now) if commits.flow.ring is not None else []
    found += [Wait("", step, names, s, "server") for names, s in votes if s >= MOMENT_SECONDS]
    return found


def _lags(commits: Commits, now: float) -> list[Wait]:
    return [
        Wait(commit.worker, commit.clock, behind, max(0.0, now - commit.item.since), "lag")
        for commit in commits.flow.parked()
        if (behind := commits.rounds.behind(commit.worker, commit.clock))
    ]


def _backups(slots: Iterable[HostedSlice], now: float) -> list[Wait]:
    longest: dict[str, float] = {}
    for slot in slots:
        update = slot.in_flight
        for send in update.sends if update is not None else ():
            if not send.is_acknowledged:
                name = send.partner.name
                longest[name] = max(longest.get(name, 0.0), now - send.update.since)
    return [Wait("", 0, [name], seconds, "server") for name, seconds in longest.items() if seconds >= MOMENT_SECONDS]
