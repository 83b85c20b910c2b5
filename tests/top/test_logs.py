"""The end of a log that grows: whole lines, nothing that a terminal would obey, logs that begin again."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.top import logs
from syncline.top.logs import LogTail, clean


def test_a_file_that_grows_and_begins_again(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "worker-0.log"
    tail = LogTail(path)
    assert tail.read() is None
    path.write_text("one\ntwo\nth")
    assert tail.read() == ["one", "two"] and tail.read() == []
    with open(path, "a") as file:
        file.write("ree\n")
    assert tail.read() == ["three"]
    path.write_text("new\n")
    assert tail.read() == ["new"]
    path.unlink()
    assert tail.read() is None


def test_only_the_end_of_a_large_one(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_BYTES", 100)
    path = tmp_path / "x.log"
    path.write_text("".join(f"line {k}\n" for k in range(100)))
    found = LogTail(path).read()
    assert found is not None and found[-1] == "line 99" and len(found) < 20
    assert all(line.startswith("line ") for line in found), "no half line at the beginning"


def test_nothing_is_obeyed() -> None:
    assert clean(b"\x1b]0;title\x07\x1b[2J\x1b[1;31mred\x1b[0m") == "red"
    assert clean(b"10%\r50%\r100%\r") == "100%"
    assert clean(b"a\tb\x00") == "a b\ufffd"


@given(st.binary(max_size=200))
def test_any_bytes_become_printable(line: bytes) -> None:
    assert clean(line).isprintable()
