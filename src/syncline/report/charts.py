"""Lines as SVG, without scripts. Labels are HTML beside the picture, so that they stay readable at every width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import msgspec

from syncline.core.units import number_told

#: The picture has this width and height inside; the page stretches it.
WIDTH, HEIGHT = 1000.0, 1000.0
#: Colours of style.css, one after the other.
NUM_COLORS = 8
MARKED = {"death": "bad", "join": "good", "stop": "warn", "promotion": "warn", "scale": "good", "coordinator": "warn"}
MOST_MARKS = 60


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart; a value that is None is a gap."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()  #: with `high`: a band around it
    high: Sequence[float | None] = ()
    color: int = 0


class ChartMark(msgspec.Struct, frozen=True):
    """Something that happened at this place of the axis."""

    x: float
    kind: str
    text: str


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    found = [number * step for number in range(first, first + 2 * most + 2)]
    return [0.0 if abs(tick) < step * 1e-6 else tick for tick in found if tick <= high + step * 1e-9]


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    unit: Callable[[float | None], str] = number_told,
    x_unit: Callable[[float | None], str] = number_told,
    x_name: str = "step",
    from_zero: bool = False,
    has_now: bool = True,
    marks: Sequence[ChartMark] = (),
) -> str:
    """A card with a title, the last value, and the lines; "" where no line has a value."""
    xs = [x for line in lines for x, y in zip(line.x, line.y, strict=True) if x is not None and _is_number(y)]
    sides = [side for line in lines for side in (line.y, line.low, line.high)]
    ys = [y for side in sides for y in side if y is not None and _is_number(y)]
    if not xs or not ys:
        return ""
    left, right = min(xs), max(xs)
    low, high = (min(0.0, *ys), max(ys)) if from_zero else (min(ys), max(ys))
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = (low if from_zero and low == 0 else low - room), high + room

    def place_x(x: float) -> float:
        return WIDTH * (x - left) / (right - left) if right > left else WIDTH / 2

    def place_y(y: float) -> float:
        return HEIGHT * (high - y) / (high - low)

    drawn = [f'<path class="grid" d="M0 {place_y(y):.1f}H{WIDTH:g}"/>' for y in ticks(low, high)]
    for mark in _spread(marks, left, right):
        kind = MARKED[mark.kind]
        drawn.append(
            f'<path class="mark {kind}" d="M{place_x(mark.x):.1f} 0V{HEIGHT:g}"><title>{escape(mark.text[:200])}'
            "</title></path>"
        )
    for line in lines:
        color = f"c{line.color % NUM_COLORS}"
        if line.low and line.high:
            drawn.append(f'<path class="band {color}" d="{_band(line, place_x, place_y)}"/>')
        last = next((y for y in reversed(line.y) if _is_number(y)), None)
        told = escape(f"{line.label}: {unit(last)}")
        drawn.append(
            f'<path class="line {color}" d="{_path(line.x, line.y, place_x, place_y)}"><title>{told}</title></path>'
        )
    labels = [
        f'<span class="y" style="top:{place_y(y) / HEIGHT:.2%}">{escape(unit(y))}</span>' for y in ticks(low, high)
    ]
    for tick in ticks(left, right, 4) if right > left else [left]:
        share = place_x(tick) / WIDTH
        labels.append(f'<span class="x" style="left:{share:.2%}">{escape(x_unit(tick))}</span>')
    now = unit(next((y for y in reversed(lines[0].y) if _is_number(y)), None)) if has_now and len(lines) == 1 else ""
    legend = "".join(f'<span><i class="c{line.color % NUM_COLORS}"></i>{escape(line.label)}</span>' for line in lines)
    return (
        f'<figure class="card chart"><figcaption><b>{escape(title)}</b><span class="now">{escape(now)}</span>'
        f"</figcaption>{f'<div class=legend>{legend}</div>' if len(lines) > 1 else ''}"
        f'<div class="plot"><svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(drawn)}</svg>{"".join(labels)}'
        f'<span class="axis">{escape(x_name)}</span></div></figure>'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _spread(marks: Sequence[ChartMark], left: float, right: float) -> list[ChartMark]:
    found = [mark for mark in marks if mark.kind in MARKED and left <= mark.x <= right]
    return found[:: -(-len(found) // MOST_MARKS) or 1]


def _path(
    xs: Sequence[float], ys: Sequence[float | None], place_x: Callable[[float], float],
    place_y: Callable[[float], float],
) -> str:  # fmt: skip
    parts, pen, alone = [], "M", True
    for x, y in zip(xs, ys, strict=True):
        if y is None or not _is_number(y):
            pen = "M"
            continue
        alone = pen == "M"
        parts.append(f"{pen}{place_x(x):.1f} {place_y(y):.1f}")
        pen = "L"
    return "".join(parts) + ("h0" if alone and parts else "")  # a point that is alone is drawn too


def _band(line: Line, place_x: Callable[[float], float], place_y: Callable[[float], float]) -> str:
    points = [
        (place_x(x), place_y(float(low)), place_y(float(high)))
        for x, low, high in zip(line.x, line.low, line.high, strict=True)
        if low is not None and high is not None and _is_number(low) and _is_number(high)
    ]
    if not points:
        return ""
    there = "L".join(f"{x:.1f} {high:.1f}" for x, _, high in points)
    back = "L".join(f"{x:.1f} {low:.1f}" for x, low, _ in reversed(points))
    return f"M{there}L{back}Z"
