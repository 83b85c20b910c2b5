"""Draws a step of a pipeline from its timeline: python tools/docs/pipeline.py TRACE.json PICTURE.svg

`examples/pipeline_transformer.py --timeline TRACE.json` writes one: the forwards and backwards of the last step.
Nothing else is drawn.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import NamedTuple

from drawing import BLUE, GREEN, LINE, PANEL, SERVER, SOFT, WORKER, line, picture, rect, text

WIDTH, LEFT, RIGHT, TOP, ROW = 860.0, 96.0, 830.0, 92.0, 58.0
#: A box needs so much room for the number of its micro-batch.
LEGIBLE = 13.0


class Span(NamedTuple):
    stage: int
    part: int
    kind: str  # F or B
    micro_batch: int
    begin: float
    end: float


def read(path: pathlib.Path) -> tuple[str, list[Span]]:
    """The schedule and the spans, from the first of them on."""
    found = json.loads(path.read_text())
    spans = [Span(*each) for each in found["spans"]]
    start = min(span.begin for span in spans)
    return found["schedule"], [span._replace(begin=span.begin - start, end=span.end - start) for span in spans]


def spacing(seconds: float) -> float:
    """Between two marks of the axis: 1, 2 or 5 times a power of ten, for at most eight marks."""
    scale = 1e-6
    while True:
        for factor in (1, 2, 5):
            if seconds / (scale * factor) <= 8:
                return scale * factor
        scale *= 10


def draw(schedule: str, spans: list[Span]) -> str:
    num_stages, num_parts = max(s.stage for s in spans) + 1, max(s.part for s in spans) + 1
    num_micro = max(s.micro_batch for s in spans) + 1
    length = max(s.end for s in spans)
    height = TOP + ROW * num_stages + 58

    def at(seconds: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * seconds / length, 1)

    busy = sum(s.end - s.begin for s in spans)
    parts = [rect(12, 12, WIDTH - 24, height - 24, PANEL, radius=10)]
    title = f"One step of a pipeline: {num_stages} stages, {num_micro} micro-batches, {schedule}"
    parts.append(text(30, 40, title, 15, weight=700, anchor="start"))
    part = busy / (num_stages * length)
    told = f"The stages compute for {part:.0%} of these {length * 1e3:.1f} ms; gaps are the bubble."
    parts.append(text(30, 61, told, 12, SOFT, anchor="start"))
    for x, label, fill, color in ((640, "forward", WORKER, BLUE), (734, "backward", SERVER, GREEN)):
        parts.append(rect(x, 30, 14, 14, fill, color, radius=2))
        parts.append(text(x + 21, 41, label, 12, SOFT, anchor="start"))
    bottom = TOP + ROW * num_stages
    mark = spacing(length)
    for number in range(int(length / mark) + 1):
        x = at(number * mark)
        parts.append(line(x, TOP - 8, x, bottom, LINE))
        parts.append(text(x, bottom + 18, f"{number * mark * 1e3:g}", 11, SOFT))
    parts.append(text((LEFT + RIGHT) / 2, bottom + 34, "milliseconds", 11, SOFT))
    parts += [
        text(LEFT - 12, TOP + ROW * stage + 27, f"stage {stage}", 13, weight=600, anchor="end")
        for stage in range(num_stages)
    ]
    for span in sorted(spans):
        x, y = at(span.begin), TOP + ROW * span.stage
        width = max(0.6, round(at(span.end) - x, 1))
        fill, color = (WORKER, BLUE) if span.kind == "F" else (SERVER, GREEN)
        parts.append(rect(x, y, width, ROW - 16, fill, color, radius=2))
        label = str(span.micro_batch) + ("ab"[span.part // num_stages % 2] if num_parts > num_stages else "")
        if width >= LEGIBLE * (1 + 0.5 * (len(label) - 1)):
            parts.append(text(round(x + width / 2, 1), y + 26, label, 12))
    return picture(WIDTH, height, title, parts, ())


def main() -> None:
    trace, target = map(pathlib.Path, sys.argv[1:3])
    target.write_text(draw(*read(trace)))


if __name__ == "__main__":
    main()
