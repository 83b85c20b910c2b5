"""A server's numbers, added up over its slices."""

from __future__ import annotations

from collections.abc import Collection

from syncline.server.commits import Commits
from syncline.server.hosted import HostedSlice
from syncline.server.pulls import Pulls
from syncline.stats import ServerStats, WireStats


def stats_of(
    name: str, slots: Collection[HostedSlice], commits: Commits | None, pulls: Pulls, wire: WireStats
) -> ServerStats:
    """What this server has done so far; before the job has begun there are no commits."""
    flow = commits.flow if commits else None
    return ServerStats(
        name=name,
        num_slices=len(slots),
        parameter_bytes=sum(slot.part.num_bytes for slot in slots),
        num_updates=sum(slot.num_updates for slot in slots),
        most_updates=max((slot.state.version for slot in slots), default=0),
        num_commits=commits.num_commits if commits else 0,
        num_late=commits.num_late if commits else 0,
        apply_seconds=sum(slot.apply_seconds for slot in slots),
        num_rounds=flow.num_rounds if flow else 0,
        round_seconds=flow.round_seconds if flow else 0.0,
        bytes_copied=pulls.bytes_copied,
        staleness_sum=float(sum(slot.staleness_sum for slot in slots)),
        staleness_count=sum(slot.staleness_count for slot in slots),
        staleness_max=max((slot.staleness_max for slot in slots), default=0),
        damping_sum=sum(slot.damping_sum for slot in slots),
        lag_max=flow.lag_max if flow else 0,
        num_pins=pulls.num_pins,
        wire=wire,
    )
