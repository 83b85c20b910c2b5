"""Collectives: what ranks must agree on, which bytes go from whom to whom, how work is split. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from syncline.core.units import listed
from syncline.core.wire.collectives import STRANGER, Describe, Shape
from syncline.errors import CollectiveError, FrameError

OPS = ("average", "sum", "min", "max", "product")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
VERBS = (*REDUCING, "all_gather", "gather", "scatter", "broadcast", "all_to_all", "barrier", "restart")
_ROOTED = ("reduce", "gather", "scatter", "broadcast")
_FROM_ROOT = ("scatter", "broadcast")
_IN_PARTS = ("reduce_scatter", "scatter", "all_to_all")
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
MAX_DIMENSIONS = 64
MAX_BYTES = 1 << 44
#: Data up to this size is sent with the description.
INLINE_BYTES = 16 << 10
_REMEDY = "; all ranks of a group make the same calls in the same order"
_RESTART = (
    "; their scripts are not at the same place, so this call fails at all of them. Catch the error in every worker "
    "and call syncline.collectives.restart() (docs/guides/collectives.md, 'When a worker starts again')"
)
#: Parts of a reduction begin at cache lines.
_LINE = 64


def num_bytes(dtype: str, shape: Shape) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype] if dtype else 0


def check_op(op: str, dtype: str) -> None:
    """Raises CollectiveError if the dtype does not support the operation."""
    if op not in OPS:
        raise CollectiveError(f"op={op!r}: must be one of {', '.join(OPS)}")
    if dtype == "bool" and op not in ("min", "max"):
        raise CollectiveError(f"{op} of bool: use max for any, min for all, or numbers")
    if op == "average" and not dtype.startswith(("float", "bfloat", "complex")):
        raise CollectiveError(f"average of {dtype}: use sum, and divide as you want it rounded")
    if op in ("min", "max") and dtype.startswith("complex"):
        raise CollectiveError(f"{op} of {dtype}: complex numbers have no order; use sum, average or product")


def check_heard(said: Describe, sender: int, me: int) -> None:
    """Raises FrameError for a message that violates the protocol."""
    shapes = (said.shape, *said.parts)
    if said.verb not in VERBS or (said.dtype and said.dtype not in ITEM_BYTES):
        raise FrameError(f"a collective {said.verb[:20]!r} of {said.dtype[:20]!r}")
    if sender not in said.group or me not in said.group or len(set(said.group)) != len(said.group):
        raise FrameError("a collective of a group that this worker, or the one that says so, is not in")
    if len(said.parts) not in (0, len(said.group)) or any(len(shape) > MAX_DIMENSIONS for shape in shapes):
        raise FrameError("a collective of pieces, or of dimensions, that cannot be")
    if any(size < 0 for shape in shapes for size in shape) or said.number < 0 or said.offset < 0:
        raise FrameError("a collective of less than nothing")
    if len(said.failures) not in (0, len(said.group)):
        raise FrameError("a collective with failures of another number of members")
    if any(num_bytes(said.dtype, shape) > MAX_BYTES for shape in shapes):
        raise FrameError(f"a collective of more than {MAX_BYTES} bytes")


def even_parts(shape: Shape, count: int) -> tuple[Shape, ...]:
    """The shapes of `count` pieces along the first dimension; the first ones may be larger by one."""
    if not shape:
        raise CollectiveError("a single number cannot be split; give an array with a first dimension")
    least, more = divmod(shape[0], count)
    return tuple((least + (k < more), *shape[1:]) for k in range(count))


def parts_of(shape: Shape, splits: Sequence[int] | None, count: int) -> tuple[Shape, ...]:
    """The shapes by given sizes along the first dimension."""
    if splits is None:
        return even_parts(shape, count)
    if len(splits) != count or not shape or sum(splits) != shape[0] or min(splits) < 0:
        size = shape[0] if shape else 1
        raise CollectiveError(f"splits={list(splits)}: {count} sizes are needed, {size} in all")
    return tuple((int(size), *shape[1:]) for size in splits)


def given(said: Describe, place: int) -> int:
    """Bytes that this member contributes."""
    if not said.dtype or (said.verb in _FROM_ROOT and said.group[place] != said.root):
        return 0
    if said.parts:
        return sum(num_bytes(said.dtype, part) for part in said.parts)
    return num_bytes(said.dtype, said.shape)


def wanted(said: Describe, source: int, reader: int) -> tuple[int, int]:
    """Offset and size of the source's data for the reader."""
    count = given(said, source)
    if not count or (said.verb in ("reduce", "gather") and said.group[reader] != said.root):
        return 0, 0
    if said.verb in _IN_PARTS and said.parts:
        sizes = [num_bytes(said.dtype, part) for part in said.parts]
        return sum(sizes[:reader]), sizes[reader]
    return 0, count


def is_inline(said: Describe, source: int) -> bool:
    """Whether the source's data comes with its description."""
    return given(said, source) <= INLINE_BYTES


# -- agreeing ---------------------------------------------------------------------------------------------------


def disagreement(names: Sequence[str], said: Sequence[Describe]) -> str:
    """Which members called something else, in words that are the same on all ranks; empty if all agree."""
    first, verb = said[0], said[0].verb
    reason = apart(names, said)
    if reason:
        return reason
    if verb not in _FROM_ROOT and all(_is_like(one, first) for one in said):
        return ""
    differences: list[Callable[[Describe], object]] = [lambda one: one.verb]
    if verb in REDUCING:
        differences += [lambda one: (one.dtype, one.shape), lambda one: one.op, lambda one: one.parts]
    elif verb in ("all_gather", "gather"):
        differences += [lambda one: (one.dtype, len(one.shape), one.shape[1:])]
    elif verb == "all_to_all":
        differences += [lambda one: one.dtype]
    if verb in _ROOTED:
        differences += [lambda one: one.root]
    if any(len({key(one) for one in said}) > 1 for key in differences):
        return _words(names, said)
    against_root = _against_root(names, said) if verb in _FROM_ROOT else ""
    if against_root:
        return against_root
    for place, one in enumerate(said):
        result = result_of(said, place)
        if one.into is not None and one.into != result:
            has, gets = (f"{dtype}{_shape(shape)}" for dtype, shape in (one.into, result))
            return f"{names[place]} called {verb} into {has}, and the result is {gets}"
    return ""


def apart(names: Sequence[str], said: Sequence[Describe]) -> str:
    """Why these scripts are not at the same place, in words that are the same on all ranks; empty if they are.

    They are if all have restarted equally often, none started after another had made calls, and every two have seen
    the same number of their common calls fail. `restart` brings them back together.
    """
    if not any(one.failures for one in said) and all(one.attempt == said[0].attempt for one in said):
        return ""
    if all(one.verb == "restart" for one in said):
        return ""
    strangers = {other for one in said for other, count in enumerate(one.failures) if count == STRANGER}
    if strangers:
        older: dict[int, list[str]] = {}
        for name, one in zip(names, said, strict=True):
            if STRANGER in one.failures:
                older.setdefault(one.num_calls, []).append(name)
        made = [f"{listed(who)} had made {_calls(count)}" for count, who in older.items()]
        newer = listed([names[place] for place in sorted(strangers)])
        return f"{newer} began its script after {listed(made)}{_RESTART}"
    if len({one.attempt for one in said}) > 1:
        times = [f"{name} {one.attempt}" for name, one in zip(names, said, strict=True)]
        return f"the workers have not restarted equally often ({', '.join(times)}){_RESTART}"
    for place, one in enumerate(said):
        for other in range(place):
            here, there = _failures(one, other), _failures(said[other], place)
            if here != there:
                one_name, two_name = names[other], names[place]
                counts = f"{there} failed at {one_name} and {here} at {two_name}"
                return f"of the calls that {one_name} and {two_name} made together, {counts}{_RESTART}"
    return ""


def apart_in_pair(newer: str, older: str) -> str:
    """Like `apart`, for `send` and `recv`: one script started, or restarted, after the other had made calls."""
    return f"{newer} began its script, or restarted, after {older} had made collective calls{_RESTART}"


def _calls(count: int) -> str:
    return "1 collective call" if count == 1 else f"{count} collective calls"


def _failures(said: Describe, place: int) -> int:
    return said.failures[place] if said.failures else 0


def _is_like(one: Describe, other: Describe) -> bool:
    """Whether these two calls match, superficially."""
    return (
        one.verb == other.verb
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.op == other.op
        and one.root == other.root
        and one.parts == other.parts
        and one.into is None
    )


def result_of(said: Sequence[Describe], place: int) -> tuple[str, Shape]:
    """Dtype and shape of what the member at this place gets."""
    one = said[place]
    if one.verb in ("all_gather", "gather"):
        return one.dtype, (sum(other.shape[0] if other.shape else 1 for other in said), *one.shape[1:])
    return one.dtype, one.parts[place] if one.parts else one.shape


def _against_root(names: Sequence[str], said: Sequence[Describe]) -> str:
    """Checks that each output buffer fits the result."""
    place = said[0].group.index(said[0].root)
    root = said[place]
    for reader, one in enumerate(said):
        shape = root.parts[reader] if root.parts else root.shape
        if one.dtype and reader != place and (one.dtype, one.shape) != (root.dtype, shape):
            what = f"{root.dtype}{_shape(shape)}"
            return (
                f"{names[reader]} called {one.verb} into {one.dtype}{_shape(one.shape)}, and gets {what} from "
                f"{names[place]}"
            )
    return ""


def _shape(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def described(one: Describe, names: dict[int, str] | None = None, shown: Collection[str] = ()) -> str:
    """Describes a call; `shown`: which of `op`, `root` and `parts` to include."""
    words = [one.verb]
    if one.dtype:
        words.append(f"of {one.dtype}{_shape(one.shape)}")
    if one.op and "op" in shown:
        words.append(f"({one.op})")
    if one.verb in _ROOTED and "root" in shown:
        words.append(f"with root {(names or {}).get(one.root, 'another')}")
    if one.parts and "parts" in shown:
        words.append(f"in pieces of {', '.join(str(part[0]) for part in one.parts)}")
    return " ".join(words)


def _words(names: Sequence[str], said: Sequence[Describe]) -> str:
    known = dict(zip(said[0].group, names, strict=True))
    shown = [field for field in ("op", "root", "parts") if len({getattr(one, field) for one in said}) > 1]
    callers: dict[str, list[str]] = {}
    for name, one in zip(names, said, strict=True):
        callers.setdefault(described(one, known, shown), []).append(name)
    # The most common call comes last; of several, that of the lowest rank.
    ordered = sorted(callers.items(), key=lambda item: (len(item[1]), -names.index(item[1][0])))
    is_one_verb = len({one.verb for one in said}) == 1
    parts = []
    for k, (what, who) in enumerate(ordered):
        text = what.removeprefix(f"{said[0].verb} ") if k and is_one_verb else f"called {what}"
        parts.append(f"{listed(who)} {text}")
    return f"{', '.join(parts)}{_REMEDY}"


def other_groups(one: tuple[str, Describe], two: tuple[str, Describe], names: dict[int, str]) -> str:
    """Two members called collectives of different groups; the same words at both."""
    parts = []
    for name, said in sorted((one, two), key=lambda call: call[0]):
        group = listed([names.get(number, "another") for number in said.group])
        parts.append(f"{name} called {described(said)} among {group}")
    return f"{', '.join(parts)}{_REMEDY}"


def crossing_words(name: str, what: str, other: str, said: Describe) -> str:
    """One member called a point-to-point operation while the other waits for it in a collective."""
    return f"{name} called {what}, {other} called {described(said)}{_REMEDY}"


# -- splitting --------------------------------------------------------------------------------------------------


def hosts_of(said: Sequence[Describe]) -> list[list[int]] | None:
    """The members' indices by host; None if only some members of a host share memory."""
    hosts: dict[int, list[int]] = {}
    for place, one in enumerate(said):
        hosts.setdefault(one.host, []).append(place)
    if any(said[place].sharing != len(places) for places in hosts.values() for place in places):
        return None
    return sorted(hosts.values())


def share(number: int, count: int, num_bytes: int) -> tuple[int, int]:
    """Part `number` of `count` of this many bytes, aligned to cache lines: start and end."""
    lines = -(-num_bytes // _LINE)
    start, end = (min(num_bytes, _LINE * (lines * k // count)) for k in (number, number + 1))
    return start, end
