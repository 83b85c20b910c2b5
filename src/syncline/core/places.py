"""Places: counted along a lease, from and to."""

from __future__ import annotations

from collections.abc import Iterable

Places = tuple[int, int]


def merged(places: Iterable[Places]) -> list[Places]:
    """The same places in order, what touches together."""
    found: list[Places] = []
    for begin, end in sorted(places):
        if begin >= end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def without(places: Iterable[Places], gone: Places) -> list[Places]:
    """What is left of these places."""
    found = []
    for begin, end in places:
        found += [(begin, min(end, gone[0])), (max(begin, gone[1]), end)]
    return [(begin, end) for begin, end in found if begin < end]
