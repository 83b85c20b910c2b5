"""Draws the plots of the performance page from its tables: python tools/docs/plots.py PAGE FOLDER

The tables are the only source of the figures: change a table, run this again, and commit both.
"""

from __future__ import annotations

import math
import pathlib
import re
import sys

from drawing import AMBER, BLUE, GREEN, LINE, PANEL, SOFT, code, line, picture, rect, text

Table = list[dict[str, str]]
WIDTH = 860.0


def tables(page: str) -> list[Table]:
    """Each table of a page as rows by the titles of its columns."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in row.strip("|\n").split("|")] for row in block.splitlines()]
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def first_with(found: list[Table], *titles: str) -> Table:
    return next(table for table in found if set(titles) <= set(table[0]))


def number(cell: str) -> float:
    return float(re.sub(r"[^\d.]", "", cell))


def dot(x: float, y: float, color: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{color}"/>'


# -- ratios -------------------------------------------------------------------------------------------------


def ratios(rows: Table) -> str:
    """One line for each row on a logarithmic axis: the range, the median, the goal."""
    left, right, top, step = 190.0, WIDTH - 90, 62.0, 25.0
    height = top + step * len(rows) + 50
    bottom = height - 44

    def at(ratio: float) -> float:
        return left + (right - left) * (math.log10(ratio) + 1) / 2

    parts = [rect(12, 12, WIDTH - 24, height - 24, PANEL, radius=10)]
    parts.append(text(30, 38, "Ours divided by the reference", 15, weight=700, anchor="start"))
    for ratio in (0.1, 0.2, 0.5, 1, 2, 5, 10):
        parts.append(line(round(at(ratio), 1), top - 12, round(at(ratio), 1), bottom, SOFT if ratio == 1 else LINE))
        parts.append(text(round(at(ratio), 1), bottom + 18, f"{ratio:g}×", 12, SOFT))
    for place, row in enumerate(rows):
        y = top + step * place + 4
        middle = number(row["ratio"])
        goal = re.fullmatch(r"≤ ([\d.]+)×", row["goal"])
        color = BLUE if goal is None else GREEN if middle <= float(goal[1]) else AMBER
        low, high = (number(each) for each in row["lowest to highest"].split(" to "))
        parts.append(code(left - 20, y + 4, row["row"].strip("`"), 12, anchor="end"))
        parts.append(line(round(at(low), 1), y, round(at(high), 1), y, color, 3))
        parts.append(dot(round(at(middle), 1), y, color))
        if goal is not None:
            x = round(at(float(goal[1])), 1)
            parts.append(line(x, y - 9, x, y + 9, "#1c2733", 2))
        parts.append(text(right + 60, y + 4, row["ratio"], 12, anchor="end"))
    y = 33.0
    for x, label, color in ((430, "meets its goal", GREEN), (560, "misses it", AMBER), (660, "no such goal", BLUE)):
        parts.append(dot(x, y, color) + text(x + 12, y + 4, label, 12, SOFT, anchor="start"))
    parts.append(line(778, y - 8, 778, y + 8, "#1c2733", 2) + text(786, y + 4, "goal", 12, SOFT, anchor="start"))
    return picture(WIDTH, height, "Ratios of ours to the reference, by row", parts, ())


# -- bars ---------------------------------------------------------------------------------------------------


def bars(title: str, unit: str, groups: list[tuple[str, list[float]]], names: tuple[str, str]) -> str:
    """Two bars for each group, with their values."""
    height, left, bottom, top = 330.0, 40.0, 270.0, 76.0
    most = max(value for _, values in groups for value in values)
    room = (WIDTH - 2 * left) / len(groups)
    parts = [rect(12, 12, WIDTH - 24, height - 24, PANEL, radius=10)]
    parts.append(text(30, 40, title, 15, weight=700, anchor="start"))
    for x, name, color in ((560.0, names[0], BLUE), (700.0, names[1], AMBER)):
        parts.append(rect(x, 28, 14, 14, color, color, 2) + text(x + 22, 40, name, 13, SOFT, anchor="start"))
    parts.append(line(left, bottom, WIDTH - left, bottom, SOFT))
    for place, (label, values) in enumerate(groups):
        middle = left + room * (place + 0.5)
        parts.append(text(middle, bottom + 22, label, 13, SOFT))
        for x, value, color in zip((middle - 50, middle + 4), values, (BLUE, AMBER), strict=True):
            tall = round((bottom - top) * value / most, 1)
            parts.append(rect(x, bottom - tall, 46, tall, color, color, 2))
            parts.append(text(x + 23, bottom - tall - 6, f"{value:,.0f}{unit}", 12))
    return picture(WIDTH, height, title, parts, ())


def scaling(rows: Table) -> str:
    groups = [(f"{row['workers']} workers", [number(row["ours"]), number(row["DDP on gloo"])]) for row in rows]
    groups[0] = ("1 worker", groups[0][1])
    return bars("Samples per second on two cores: more is better", "", groups, ("ours", "DDP on gloo"))


def ring_servers(rows: Table) -> str:
    groups = [
        (f"{row['workers']} hosts, {row['link']}", [number(row["ring"]), number(row["servers"])]) for row in rows
    ]
    return bars("Time of a step of 16 MiB: less is better", " ms", groups, ("ring", "servers"))


def plots(page: str) -> dict[str, str]:
    """The plots by the names of their files."""
    found = tables(page)
    return {
        "performance-ratios.svg": ratios(first_with(found, "ratio", "goal")),
        "performance-scaling.svg": scaling(first_with(found, "workers", "DDP on gloo")),
        "performance-ring-servers.svg": ring_servers(first_with(found, "workers", "link", "ring")),
    }


if __name__ == "__main__":
    page, folder = map(pathlib.Path, sys.argv[1:])
    for name, drawn in plots(page.read_text()).items():
        (folder / name).write_text(drawn)
