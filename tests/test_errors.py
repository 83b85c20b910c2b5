"""One tree of errors, drawn as it is, that crosses connections whole."""

from __future__ import annotations

import re

import pytest

from syncline import errors
from syncline.errors import SynclineError, from_wire, to_wire


def subclasses(root: type[SynclineError]) -> list[type[SynclineError]]:
    """All of ours below this one; tests elsewhere may have made more."""
    found = [root]
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            found += subclasses(child)
    return found


TREE = subclasses(SynclineError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Whoever reads the picture must be able to rely on it: names, order of descent, and nothing left out."""
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in str(errors.__doc__).splitlines():
        match = re.match(r"^([│├└─ ]*)([A-Z]\w+)(?:  +\w|$)", line)
        if not match:
            continue
        depth, name = len(match[1]), match[2]
        above = [(other, parent) for other, parent in above if other < depth]
        parents[name] = above[-1][1] if above else ""
        above.append((depth, name))
    actual = {kind.__name__: next(b.__name__ for b in kind.__mro__[1:] if b in TREE) for kind in TREE[1:]}
    assert parents == {"SynclineError": "", **actual}


def test_each_error_says_in_the_picture_what_it_says_by_itself() -> None:
    for kind in TREE[1:]:
        (said,) = re.findall(rf"{kind.__name__} +(.+)", str(errors.__doc__))
        assert str(kind.__doc__).lower().startswith(said.split(";")[0].lower()), kind.__name__


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_an_error_crosses_a_connection_as_what_it_is(kind: type[SynclineError]) -> None:
    """`except LayoutError` in a script must catch what the coordinator raised."""
    back = from_wire(*to_wire(kind("worker-1 did it; do otherwise")))
    assert type(back) is kind
    assert str(back) == "worker-1 did it; do otherwise"


def test_a_foreign_error_keeps_its_name_in_the_message() -> None:
    back = from_wire(*to_wire(ZeroDivisionError("by zero")))
    assert type(back) is SynclineError
    assert str(back) == "ZeroDivisionError: by zero"


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "SystemExit", "Exception", "os.system", ""])
def test_a_name_from_outside_makes_only_errors_of_ours(name: str) -> None:
    """The other side chooses the name: it must not choose what is raised here."""
    assert type(from_wire(name, "x")) is SynclineError


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.ConnectionLost, ConnectionError)
    assert issubclass(errors.WaitTimeout, TimeoutError)
