"""Parts of a page. Everything that users wrote goes through `escape`."""

from __future__ import annotations

import functools
import importlib.resources
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import syncline

#: A page loads nothing and runs nothing, whatever is in it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@functools.cache
def _style() -> str:
    return importlib.resources.files("syncline.report").joinpath("style.css").read_text()


def page(title: str, body: Iterable[str]) -> str:
    """A whole file."""
    made = f"Made by syncline {escape(syncline.__version__)} on {moment(time.time())}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{_style()}</style></head><body><main>{''.join(body)}<footer>{made}</footer></main></body></html>\n"
    )


def moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def section(title: str, *parts: str) -> str:
    """A heading with its parts; "" where there are none."""
    found = [part for part in parts if part]
    return f"<h2>{escape(title)}</h2>{''.join(found)}" if found else ""


def tiles(values: Iterable[tuple[str, str]]) -> str:
    made = "".join(
        f"<div class=tile><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in values
    )
    return f"<div class=tiles>{made}</div>" if made else ""


def charts(made: Iterable[str]) -> str:
    found = "".join(made)
    return f"<div class=charts>{found}</div>" if found else ""


def notice(title: str, text: str = "", kind: str = "") -> str:
    below = f"<p>{escape(text)}</p>" if text else ""
    return f'<div class="notice {kind}"><b>{escape(title)}</b>{below}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text: Sequence[int] = (0,)) -> str:
    """`text`: columns with words; the others have numbers."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{f' class={_kind(cell, number, text)}' if number in text else ''}>{escape(cell)}</{tag}>"
            for number, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    top = f"<thead><tr>{cells(head, 'th')}</tr></thead>"
    return f'<div class="card flat"><table>{top}<tbody>{body}</tbody></table></div>'


def _kind(cell: str, number: int, text: Sequence[int]) -> str:
    return '"text wide"' if number == text[-1] and len(cell) > 40 else "text"


def bars(rows: Iterable[tuple[str, Sequence[float], str]], names: Sequence[str], colors: Sequence[int] = ()) -> str:
    """Rows of stacked bars, as long as their values: label, a value for each name, what stands at the end."""
    colors = colors or range(len(names))
    found = list(rows)
    longest = max((sum(values) for _, values, _ in found), default=0.0)
    if not longest > 0:
        return ""
    legend = "".join(
        f'<span><i class="c{color}"></i>{escape(name)}</span>' for color, name in zip(colors, names, strict=True)
    )
    made = [f"<div class=legend>{legend}</div>"] if len(names) > 1 else []
    for label, values, end in found:
        parts = "".join(
            f'<i class="c{color}" style="width:{value / longest:.2%}" title="{escape(name)}"></i>'
            for color, name, value in zip(colors, names, values, strict=True)
            if value > 0
        )
        made.append(
            f'<div class=row><span title="{escape(label)}">{escape(label)}</span><div class=stack>{parts}</div>'
            f"<span>{escape(end)}</span></div>"
        )
    return f'<div class="card rows">{"".join(made)}</div>'


def told(value: Any) -> str:
    """A setting in words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    return str(value) if value not in ("", None) else "–"
