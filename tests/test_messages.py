"""Every line that a job prints and every error: collected from the source, and read with a stranger's eyes.

`python -m tests.test_messages` prints the whole list, for a review.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parents[1] / "src" / "syncline"
#: Calls whose text somebody reads: errors, and what writes lines.
SAYS = {"say", "_say", "log", "_log", "line", "verdict", "notice", "_notice", "write", "warn", "warning", "event"}
ERRORS = ("Error", "Failed", "Lost", "Timeout", "Stopped", "Launcher", "Refresh", "Warning")
#: Signs of a sentence that has to be read twice.
NOT_USED = re.compile(
    r"\b(anew|whoever|whomever|nobody|somebody|anybody|thereof|of which|by which|is to be|are to be)\b",
    re.IGNORECASE,
)
MOST_WORDS = 60


def text_of(node: ast.expr) -> str:
    """What a call says, with names in braces for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values)
        return "".join(str(part) for part in parts)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)} {text_of(node.orelse)}".strip()
    return ""


@functools.cache
def messages() -> dict[str, str]:
    """Text by place."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name not in SAYS and not name.endswith(ERRORS):
                continue
            for given in node.args:
                if (text := text_of(given)) and len(text.split()) > 2:
                    found[f"{path.relative_to(PACKAGE)}:{node.lineno}:{given.col_offset}"] = text
    return found


def test_there_are_many() -> None:
    """Else the collecting is broken, and the tests below prove nothing."""
    assert len(messages()) > 600
    assert any("cannot be combined" in text for text in messages().values())


def test_they_are_read_once() -> None:
    found = {place: text for place, text in messages().items() if NOT_USED.search(text)}
    assert found == {}


def test_they_are_short() -> None:
    found = {place: text for place, text in messages().items() if len(text.split()) > MOST_WORDS}
    assert found == {}


def test_they_are_lines_and_no_sentences_with_a_full_stop() -> None:
    """A line ends without one: a path or a value that stands last can be copied."""
    found = {place: text for place, text in messages().items() if re.search(r"[a-z]\.\s*$", text)}
    assert found == {}


if __name__ == "__main__":
    for place, text in messages().items():
        print(f"{place}  {text}")
