"""Frames: what goes in comes out, and what is not ours is refused before anything is allocated for it."""

from __future__ import annotations

import re
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.core.leasing.ranges import Span, comb
from syncline.core.wire import tables
from syncline.core.wire.message import Message
from syncline.core.wire.tables import MAY_SAY, MESSAGES, PROTOCOL, ROLES
from syncline.core.wire.traffic import Pull, StateEntry
from syncline.errors import FrameError, VersionError
from syncline.net import frame
from syncline.net.frame import Header

numbers = st.integers(-(2**63), 2**64 - 1)
plain = st.none() | st.booleans() | numbers | st.text(max_size=8) | st.lists(st.integers(0, 9), max_size=3)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type: whatever stands in a message, this can make."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: numbers, str: st.text(max_size=20), bool: st.booleans(), bytes: st.binary(max_size=20),
        float: st.floats(allow_nan=False), type(None): st.none(), Any: plain,
    }  # fmt: skip
    if kind in simple:
        return simple[kind]
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(each) for each in arguments])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*[values_of(each) for each in arguments])
    if kind is Span:
        return st.builds(comb, st.integers(0, 1 << 60), st.integers(1, 1 << 20), st.just(7), st.integers(1, 7))
    if kind not in _structs:  # first: one may have another of its own kind in it
        _structs[kind] = st.deferred(lambda: _structs_of(kind))
    return _structs[kind]


_structs: dict[Any, st.SearchStrategy[Any]] = {}


def _structs_of(kind: Any) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{field.name: values_of(field.type) for field in msgspec.structs.fields(kind)})


headers = st.builds(
    Header,
    kind=st.integers(0, len(MESSAGES) - 1),
    request=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 3),
    job=st.integers(0, 2**64 - 1),
    incarnation=st.integers(0, 2**64 - 1),
    generation=st.integers(0, 2**64 - 1),
    term=st.integers(0, 2**32 - 1),
    body_bytes=st.integers(0, frame.MAX_BODY_BYTES),
    payload_bytes=st.integers(0, frame.MAX_PAYLOAD_BYTES),
)


@given(headers)
def test_a_header_comes_back_as_it_was(header: Header) -> None:
    assert frame.parse_header(header.pack()) == header
    assert frame.parse_header(memoryview(bytearray(header.pack()))) == header
    assert header.is_answer == bool(header.flags & frame.ANSWER)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: type[Message]) -> None:
    """One strategy per message, made from its own fields: a new message is covered by being there."""

    @given(values_of(kind))
    @settings(max_examples=12)
    def round_trip(message: Message) -> None:
        number = frame.kind_of(message)
        assert frame.decode(number, frame.encode(message)) == message

    round_trip()


def test_the_table_in_the_docstring_is_the_header() -> None:
    sizes = [int(size) for size in re.findall(r"^\| (\d+) \|", str(frame.__doc__), re.MULTILINE)]
    assert sum(sizes) == frame.HEADER.size == len(Header(0, 0).pack())
    assert len(sizes) == 11


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({0: b"HTTP"}, FrameError, "not a frame of ours: it begins with b'HTTP'"),
        (
            {4: b"\x01"},
            VersionError,
            f"the other side speaks protocol 1, this one {PROTOCOL}; use one version of syncline",
        ),
        ({5: b"\x04"}, FrameError, "unknown flags 0x4"),
        ({5: b"\xff"}, FrameError, "unknown flags 0xff"),
        ({6: b"\xff\xff"}, FrameError, "unknown kind 65535"),
        ({6: len(MESSAGES).to_bytes(2, "little")}, FrameError, f"unknown kind {len(MESSAGES)}"),
        ({40: b"\xff\xff\xff\xff"}, FrameError, "a body of 4294967295 bytes; at most 67108864"),
        ({44: b"\xff" * 8}, FrameError, f"a payload of {2**64 - 1} bytes; at most {1 << 44}"),
    ],
)
def test_a_header_that_is_not_ours_is_refused_with_its_reason(
    change: dict[int, bytes], kind: type[Exception], message: str
) -> None:
    data = bytearray(Header(1, 2).pack())
    for offset, new in change.items():
        data[offset : offset + len(new)] = new
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        frame.parse_header(data)


def test_sizes_are_bounded_to_the_byte() -> None:
    largest = Header(1, 2, body_bytes=frame.MAX_BODY_BYTES, payload_bytes=frame.MAX_PAYLOAD_BYTES)
    assert frame.parse_header(largest.pack()) == largest
    for more in ({"body_bytes": frame.MAX_BODY_BYTES + 1}, {"payload_bytes": frame.MAX_PAYLOAD_BYTES + 1}):
        with pytest.raises(FrameError, match="at most"):
            frame.parse_header(Header(1, 2, **more).pack())


@pytest.mark.parametrize("size", [0, 1, 51, 53, 1000])
def test_a_header_cut_short_is_refused(size: int) -> None:
    with pytest.raises(FrameError, match=f"a header of {size} bytes, 52 are needed"):
        frame.parse_header(bytes(size))


PULL = tables.KIND[Pull]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",  # never used in MessagePack
        b"\x00",
        msgspec.msgpack.encode([[1], None]),  # too few fields
        msgspec.msgpack.encode([[1], None, True, 1]),  # too many
        msgspec.msgpack.encode([["1"], None, True]),
        msgspec.msgpack.encode([[1], None, 1]),
        msgspec.msgpack.encode([[1], None, True]) + b"\x00",
        b"\x93\xdd\xff\xff\xff\xff",  # a list of four thousand million, of which none comes
        b"\x93\x91\xcf\xff",
        b"\x91" * 100_000,  # nested deeper than Python can follow
    ],
)
def test_a_body_that_is_no_such_message_names_it(body: bytes) -> None:
    with pytest.raises(FrameError, match=r"^a Pull that cannot be read: "):
        frame.decode(PULL, body)


@pytest.mark.parametrize("nested", [b"\x91" * 100_000, b"\x81\xa1a" * 100_000])
def test_a_body_nested_deeper_than_python_can_follow_is_refused(nested: bytes) -> None:
    """`Join` carries settings of any form: a hundred thousand brackets must not end the reader's thread."""
    body = b"\x96\xa0\xa0\xa0\x00\xc0\x81\xa1k" + nested
    with pytest.raises(FrameError, match="a Join that cannot be read"):
        frame.decode(tables.KIND[tables.Join], body)


def test_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(FrameError, match="a Died that cannot be read"):
        frame.decode(tables.KIND[tables.Died], b"\x92\xa2\xff\xfe\xa0")


def test_every_message_has_one_number_and_one_place_to_be_said() -> None:
    """A verb nobody may say is dead; one that two roles may say must be meant so."""
    assert len(set(MESSAGES)) == len(MESSAGES) < 1 << 16
    assert set(MESSAGES) == {
        value for value in vars(tables).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }  # fmt: skip
    assert set(MAY_SAY) == set(ROLES)
    said = set().union(*MAY_SAY.values())
    answers = {kind.__name__ for kind in set(MESSAGES) - said}
    assert answers == {
        "Done", "Refused", "Joined", "Registered", "GivenStats", "Standings", "GivenServerStats", "Mapped",
        "GivenPlace", "Passed", "Entered", "GivenStatus", "Prepared", "Replicated", "Hosted", "GivenCopies",
        "Committed", "AskClip", "Pulled", "Verified", "GivenState", "GivenWhy", "Opened", "GivenLease",
        "GaveBack", "GivenLeaseAcks", "Saved", "WrittenScript", "SnapshotBarrierClosed", "WrittenMarked",
        "GivenResume", "Noted", "Begun",
        "GivenValidationShard", "GivenReading", "WrittenCandidate", "GivenLife", "GivenNominal", "AttachedDevice",
            "GivenPage", "GotSpans", "GivenLook", "GivenSlices", "GivenCut", "MarkedCut",
    }  # fmt: skip


def test_a_state_of_impossible_size_is_refused_before_it_is_multiplied() -> None:
    assert StateEntry(0, 0, "exp_avg", "float32", (2, 3)).num_bytes == 24
    for shape in ((-1,), (2,) * 65, (1 << 63,) * 500_000):
        with pytest.raises(FrameError, match=r"^state of float32"):
            _ = StateEntry(0, 0, "exp_avg", "float32", shape).num_bytes
    with pytest.raises(FrameError, match="state of object"):
        _ = StateEntry(0, 0, "exp_avg", "object", (1,)).num_bytes


def test_a_jobs_number_is_the_same_in_every_process() -> None:
    """It stands in every frame: were it Python's own hash, each process would have another."""
    assert frame.job_key("job-1") == 12319629500701108738
    assert frame.job_key("job-1") != frame.job_key("job-2")
