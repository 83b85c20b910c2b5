"""A second simulation of a step, told the other way round: workers as generators, and an event loop.

It knows nothing of arrays, and of the package only the order of actions.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence

from syncline.core.pipelining.schedules import Shape, actions


def played(
    shape: Shape, forward: Sequence[float], backward: Sequence[float], down: Sequence[float], up: Sequence[float]
) -> float:
    """The time of a step."""
    begun: dict[object, float] = {}
    done: dict[object, float] = {}
    free: dict[tuple[int, int], float] = {}

    def worker(program: Sequence[object]) -> Generator[float | None, float, None]:
        """Yields how long it computes; None where it has to wait; is sent the time."""
        now = yield 0.0
        for action in program:
            if action.kind in ("F", "B"):
                now = yield (forward if action.kind == "F" else backward)[action.stage]
            elif action.kind == "WAIT":
                while not all(each in done for each in action.waits):
                    now = yield None
                if (until := max(done[each] for each in action.waits)) > now:
                    now = yield until - now
            else:
                key = action.transfer
                if key not in begun:
                    begun[key] = now
                    continue
                ends = (shape.worker_of(key.cut), shape.worker_of(key.cut + 1))
                link = ends if key.kind == "F" else ends[::-1]
                start = max(now, begun[key], free.get(link, 0.0))
                done[key] = free[link] = start + (down if key.kind == "F" else up)[key.cut]

    running = [worker(program) for program in actions(shape)]
    events: list[tuple[float, int]] = []
    waiting: set[int] = set()
    ended = 0.0
    for index, each in enumerate(running):
        next(each)
        heapq.heappush(events, (0.0, index))
    while events:
        now, index = heapq.heappop(events)
        before = len(done)
        try:
            seconds = running[index].send(now)
        except StopIteration:
            ended, seconds = max(ended, now), -1.0
        if len(done) > before:
            for other in waiting:
                heapq.heappush(events, (now, other))
            waiting.clear()
        if seconds is None:
            waiting.add(index)
        elif seconds >= 0.0:
            heapq.heappush(events, (now + seconds, index))
    assert not waiting, "workers wait for each other"
    return ended
