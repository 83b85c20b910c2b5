"""Cores: assigns a host's cores to its members, so that servers and workers do not compete."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.core.units import counted

#: The servers' part of a host's cores, if there are enough for all members.
FOR_SERVERS = 0.25


def own_cores(cores: Sequence[int], place: int, servers: int, workers: int) -> list[int]:
    """The cores of one member of a host; empty if there are too few, and all members share them.

    `place`: its index among the host's members, servers first. All servers get equally many; the workers get the
    rest, the first of them one more if needed.
    """
    if place >= servers + workers or len(cores) < servers + workers:
        return []
    for_each = 0
    if servers:
        for_each = min(max(1, int(len(cores) * FOR_SERVERS) // servers), (len(cores) - workers) // servers)
    if place < servers:
        return list(cores[place * for_each : (place + 1) * for_each])
    left, number = cores[servers * for_each :], place - servers
    return list(left[len(left) * number // workers : len(left) * (number + 1) // workers])


def why_shared(num_cores: int, servers: int, workers: int) -> str:
    """Why the members of a host share cores, in words; empty if they do not."""
    if num_cores >= servers + workers:
        return ""
    members = [counted(number, role) for number, role in ((servers, "server"), (workers, "worker")) if number]
    there = f"{counted(num_cores, 'core')} for {' and '.join(members)}"
    return f"--cores auto: {there}: too few for each to have its own, so all share them"


def describe(cores: Sequence[int]) -> str:
    """`0-3,8`: the usual notation of tools."""
    found: list[list[int]] = []
    for core in sorted(cores):
        if found and found[-1][1] == core - 1:
            found[-1][1] = core
        else:
            found.append([core, core])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)
