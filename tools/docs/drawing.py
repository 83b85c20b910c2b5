"""What the scripts that draw pictures share: colors, boxes, arrows and the file around them, as plain SVG.

A picture has a light background of its own, so it reads the same on light and dark pages.
"""

from __future__ import annotations

from html import escape

TEXT, SOFT, LINE, PANEL, BACK = "#1c2733", "#51606f", "#c3cdd9", "#ffffff", "#eef2f7"
WORKER, SERVER, CONTROL, STORE = "#dbe9ff", "#d9f2e3", "#fdeccb", "#ece5fb"
BLUE, GREEN, AMBER, RED = "#2f6fde", "#1d9255", "#a9761b", "#c0392b"


def rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE, radius: float = 4) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, title: str, *below: str) -> str:
    """A process or a folder: a title, and lines of smaller text."""
    middle, first = x + width / 2, y + height / 2 - 8 * len(below) + 5
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" stroke="{LINE}"/>']
    parts.append(text(middle, first, title, 14, weight=600))
    parts += [text(middle, first + 17 * (n + 1), line, 12, SOFT) for n, line in enumerate(below)]
    return "\n".join(parts)


def text(
    x: float, y: float, what: str, size: int, fill: str = TEXT, weight: int = 400, anchor: str = "middle"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(what)}</text>'


def code(x: float, y: float, what: str, size: int = 13, fill: str = SOFT, anchor: str = "start") -> str:
    return text(x, y, what, size, fill, anchor=anchor).replace("<text", '<text font-family="monospace"')


def line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{color}" stroke-width="{width:g}" fill="none"{dashes}/>'


def arrow(x1: float, y1: float, x2: float, y2: float, color: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    mark = f' marker-end="url(#{color[1:]})"'
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{color}" stroke-width="1.8" fill="none"{dash}{mark}/>'


def picture(width: float, height: float, title: str, parts: list[str], colors: tuple[str, ...]) -> str:
    """The file. `colors`: those of arrows, each of which needs a head of its own."""
    marks = "\n".join(
        f'<marker id="{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6.5" markerHeight="6.5" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="{color}"/></marker>'
        for color in colors
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" '
    )
    back = f'<rect width="{width:g}" height="{height:g}" rx="12" fill="{BACK}"/>'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">'
    return "\n".join(
        [head + font, f"<title>{escape(title)}</title>", f"<defs>{marks}</defs>", back, *parts, "</svg>\n"]
    )
