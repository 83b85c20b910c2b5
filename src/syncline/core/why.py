"""Why: who waits for whom, since when, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from syncline.core.standings import by_name
from syncline.stats import Wait

#: A member that was heard of within this long is not the one that cannot be heard.
FRESH_SECONDS = 1.0


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a member that others wait for."""

    host: str
    heard_seconds: float  # since it was last heard of
    left_seconds: float  # until it is evicted for silence
    step: int = 0
    state: str = ""  # anything worth a word: its process ended, it is being started again


def causes(waits: Mapping[str, Sequence[Wait]]) -> list[Wait]:
    """All waits, by who has told of them, less those that others explain: a worker's for a server that itself waits
    for somebody, a server's for its backup that waits for a worker, and a server's for a worker that has done its
    part and waits at another server."""
    found = []
    for teller, wait in ((teller, wait) for teller, told in waits.items() for wait in told):
        rest = [name for name in wait.for_whom if not _is_explained(wait, teller, name, waits)]
        if rest:
            found.append(Wait(wait.who, wait.step, rest, wait.seconds, wait.what))
    return found


def _is_explained(wait: Wait, teller: str, name: str, waits: Mapping[str, Sequence[Wait]]) -> bool:
    by = waits.get(name, ())
    if wait.what == "server":
        return any(wait.who or other.what != "server" for other in by)
    servers = {server for other in by if other.what == "server" for server in other.for_whom} - {teller}
    further = [one.for_whom for server in servers for one in waits.get(server, ()) if name not in one.for_whom]
    # Somebody there waits for nobody: else those may wait for each other, and all are named.
    return any(not waits.get(last) for names in further for last in names)


def why(
    waits: Sequence[Wait], known: Mapping[str, Known], *, who: str = "", step: int = 0, stuck_seconds: float = 600.0
) -> str:
    """The longest wait, in words; with `who`, the one that this worker is in at this step of its own."""
    mine = [wait for wait in waits if wait.who == who or (not wait.who and who not in wait.for_whom)]
    ranked = sorted(mine if who else waits, key=lambda wait: -wait.seconds)
    if not ranked:
        return "nobody waits for anybody"
    wait = ranked[0]
    names = sorted(wait.for_whom, key=by_name)
    told = ", ".join(_told(name, known.get(name), wait, stuck_seconds) for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{_what(wait, step)} has waited {wait.seconds:.1f} s for {told}{more}"


def _what(wait: Wait, step: int) -> str:
    """Steps are counted by each worker for itself: who asks hears of its own."""
    if wait.what in ("round", "lag", "server"):
        return f"step {step or wait.step}" if step or wait.step else "a step"
    return wait.what


def _told(name: str, known: Known | None, wait: Wait, stuck_seconds: float) -> str:
    if known is None:
        return f"{name} (not there)"
    words = []
    if known.state:
        words.append(known.state)
    elif known.heard_seconds >= FRESH_SECONDS:
        words.append(f"last heard of {known.heard_seconds:.1f} s ago")
        words.append(f"evicted in {max(0.0, known.left_seconds):.1f} s")
    else:
        words.append(f"last heard of {known.heard_seconds:.1f} s ago")
        if wait.what in ("round", "lag"):
            words.append(f"at step {known.step}")
            words.append(f"evicted in {max(0.0, stuck_seconds - wait.seconds):.0f} s if it does not advance")
    return f"{name} on host {known.host} ({'; '.join(words)})"
