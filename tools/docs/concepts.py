"""Draws the pictures of the page of concepts: python tools/docs/concepts.py docs/images"""

from __future__ import annotations

import pathlib
import sys

from drawing import (
    AMBER,
    BLUE,
    CONTROL,
    GREEN,
    LINE,
    PANEL,
    RED,
    SOFT,
    STORE,
    TEXT,
    WORKER,
    arrow,
    box,
    code,
    line,
    picture,
    rect,
    text,
)

WIDTH = 860.0

# -- policies -----------------------------------------------------------------------------------------------

#: The length of a step of each worker; worker-1 is slow.
SPEEDS = (40, 78, 52)
SPAN = 580
Spans = list[tuple[int, int, str]]  # from, to, "step" or "wait"


def timelines(most_ahead: int | None) -> tuple[list[Spans], list[int]]:
    """What each worker does, and when updates are applied. `most_ahead`: steps ahead of the slowest; None: any."""
    spans: list[Spans] = [[] for _ in SPEEDS]
    done, free_at, waits_since = [0] * len(SPEEDS), [0] * len(SPEEDS), [-1] * len(SPEEDS)
    running = [False] * len(SPEEDS)
    updates = []
    for now in range(SPAN + 1):
        for worker, free in enumerate(free_at):
            if running[worker] and now == free:
                running[worker], done[worker], waits_since[worker] = False, done[worker] + 1, now
                updates.append(now)
        for worker, speed in enumerate(SPEEDS):
            may_start = most_ahead is None or done[worker] - min(done) <= most_ahead
            if not running[worker] and may_start:
                if waits_since[worker] not in (-1, now):
                    spans[worker].append((waits_since[worker], now, "wait"))
                running[worker], free_at[worker] = True, now + speed
                spans[worker].append((now, min(now + speed, SPAN), "step"))
    for worker, since in enumerate(waits_since):
        if not running[worker] and since < SPAN:
            spans[worker].append((since, SPAN, "wait"))
    return spans, updates


def policies() -> str:
    parts, y = [], 14.0
    rounds, _ = timelines(0)
    ends = [end for start, end, what in rounds[1] if what == "step" and end < SPAN]
    cases = (
        ("sync", "One update for each round: the mean of all workers. Fast workers wait for the slowest.", 0, ends),
        ("bounded:2", "An update for each push. A worker that is 2 steps ahead of the slowest waits.", 1, None),
        ("async", "An update for each push. No worker waits.", None, None),
    )
    for name, says, ahead, only in cases:
        spans, updates = timelines(ahead)
        parts.append(rect(14, y, WIDTH - 28, 158, PANEL, radius=10))
        parts.append(code(32, y + 26, f"--policy {name}", 14, TEXT))
        parts.append(text(250, y + 26, says, 13, SOFT, anchor="start"))
        for worker, told in enumerate(spans):
            top = y + 42 + 26 * worker
            parts.append(text(120, top + 15, f"worker-{worker}", 12, SOFT, anchor="end"))
            number = 0
            for start, end, what in told:
                fill = WORKER if what == "step" else PANEL
                parts.append(rect(140 + start, top, end - start, 20, fill, BLUE if what == "step" else LINE, 3))
                if what == "step":
                    number += 1
                    if end - start >= 24:
                        parts.append(text(140 + (start + end) / 2, top + 14, str(number), 11))
                elif end - start >= 26:
                    parts.append(text(140 + (start + end) / 2, top + 14, "wait", 11, SOFT))
        top = y + 124
        parts.append(text(120, top + 15, "updates", 12, SOFT, anchor="end"))
        parts.append(line(140, top + 10, 140 + SPAN, top + 10, LINE))
        moments = updates if only is None else only
        parts += [f'<circle cx="{140 + at}" cy="{top + 10:g}" r="4.5" fill="{GREEN}"/>' for at in moments]
        y += 170
    parts.append(
        arrow(140, y + 10, 140 + SPAN, y + 10, SOFT) + text(140 + SPAN + 12, y + 14, "time", 12, SOFT, anchor="start")
    )
    title = "Three workers of different speed under sync, bounded and async"
    return picture(WIDTH, y + 30, title, parts, (SOFT,))


# -- generations --------------------------------------------------------------------------------------------


def generations() -> str:
    height = 236.0
    parts = [rect(14, 14, WIDTH - 28, height - 28, PANEL, radius=10)]
    left, ends = 120.0, (370.0, 600.0, 830.0)
    begins = (left, *ends[:2])
    for number, (start, end) in enumerate(zip(begins, ends, strict=True), 1):
        parts.append(text((start + end) / 2, 42, f"generation {number}", 14, weight=600))
        told = ("three workers", "two workers", "three workers")[number - 1]
        parts.append(text((start + end) / 2, 60, told, 12, SOFT))
    for worker in range(2):
        y = 78.0 + 34 * worker
        parts.append(text(left - 12, y + 17, f"worker-{worker}", 13, anchor="end"))
        parts.append(rect(left, y, ends[2] - left, 24, WORKER, BLUE, 4))
    y = 146.0
    parts.append(text(left - 12, y + 17, "worker-2", 13, anchor="end"))
    parts.append(rect(left, y, 226, 24, WORKER, BLUE, 4) + text(left + 113, y + 16, "incarnation 1", 12))
    parts.append(text(left + 238, y + 18, "✕", 16, RED, weight=700))
    parts.append(rect(ends[1], y, ends[2] - ends[1], 24, WORKER, BLUE, 4))
    parts.append(text((ends[1] + ends[2]) / 2, y + 16, "incarnation 2", 12))
    for x, label in ((ends[0], "it dies: fenced, its samples reassigned"), (ends[1], "it joins again")):
        parts.append(line(x, 32, x, 184, AMBER, 1.8, "5 4"))
        parts.append(text(x, 204, label, 12, AMBER, weight=600))
    return picture(WIDTH, height, "A worker dies and joins again: three generations", parts, ())


# -- checkpoints --------------------------------------------------------------------------------------------


def checkpoints() -> str:
    height = 236.0
    parts = [rect(14, 14, WIDTH - 28, height - 28, PANEL, radius=10)]
    parts.append(text(32, 42, "First run: 4 workers, 2 servers", 14, weight=600, anchor="start"))
    parts.append(text(520, 42, "Run again: 2 workers, 1 server", 14, weight=600, anchor="start"))
    parts.append(rect(32, 58, 420, 30, WORKER, BLUE, 4) + text(242, 78, "training continues while the job saves", 12))
    parts.append(rect(520, 58, 310, 30, WORKER, BLUE, 4) + text(690, 78, "training from step 1000 on", 12))
    parts.append(text(474, 79, "✕", 16, RED, weight=700))
    for x, name in ((150, "000001-step-500"), (320, "000002-step-1000")):
        parts.append(arrow(x, 88, x, 137, GREEN))
        parts.append(box(x - 74, 140, 148, 34, STORE, name))
    parts.append(text(235, 118, "snapshot", 12, SOFT))
    parts.append(arrow(394, 157, 536, 91, GREEN))
    parts.append(code(76, 202, "--checkpoint saves", 12))
    parts.append(
        box(
            560,
            126,
            270,
            72,
            CONTROL,
            "in a checkpoint",
            "parameters, optimizer state, position in",
            "the data, job.state",
        )
    )
    return picture(WIDTH, height, "A job saves while it trains; another continues", parts, (GREEN,))


PICTURES = {"policies.svg": policies, "generations.svg": generations, "checkpoints.svg": checkpoints}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (pathlib.Path(sys.argv[1]) / name).write_text(draw())
