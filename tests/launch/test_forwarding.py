"""What a member that has ended had written is passed on, however slowly, and whoever else holds its output open."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator

import pytest
from tests.launch.played import Engine, Play, Process, Screen
from tests.patience import PATIENCE

from syncline.launch.forwarding import Forwarder
from syncline.launch.lives import Lives

LINES = [f"line {number}\n".encode() for number in range(200)]


class Pipe:
    """The output of something, and what was passed on of it."""

    def __init__(self) -> None:
        reader, self.writer = os.pipe()
        self.output = os.fdopen(reader, "rb")
        self.taken: list[bytes] = []
        self.goes_on = threading.Event()

    def take(self, raw: bytes) -> None:
        assert self.goes_on.wait(PATIENCE)
        self.taken.append(raw)

    def close(self) -> None:
        self.goes_on.set()
        with contextlib.suppress(OSError):
            os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_all_is_through_at_the_end_of_the_pipe_and_its_last_line_may_be_half_a_one(pipe: Pipe) -> None:
    pipe.goes_on.set()
    forwarder = Forwarder("one", pipe.output, pipe.take)
    os.write(pipe.writer, b"".join(LINES) + b"no end")
    pipe.close()
    assert forwarder.wait(PATIENCE) and pipe.taken == [*LINES, b"no end"]


def test_who_holds_it_open_is_not_waited_for(pipe: Pipe) -> None:
    """Not before all is passed on that was written by then, though nothing of it is in the pipe any more."""
    forwarder = Forwarder("one", pipe.output, pipe.take)
    os.write(pipe.writer, b"".join(LINES))
    assert not forwarder.wait(0.05)
    pipe.goes_on.set()
    assert forwarder.wait(PATIENCE) and pipe.taken == LINES


def test_nor_who_writes_on_and_on(pipe: Pipe) -> None:
    pipe.goes_on.set()
    forwarder, over = Forwarder("one", pipe.output, pipe.take), threading.Event()
    os.write(pipe.writer, b"".join(LINES))

    def write_on() -> None:
        while not over.is_set():
            os.write(pipe.writer, b"x" * 4095 + b"\n")

    writing = threading.Thread(target=write_on, name="write")
    writing.start()
    try:
        assert forwarder.wait(PATIENCE) and pipe.taken[: len(LINES)] == LINES
    finally:
        over.set()
        writing.join(PATIENCE)


def test_a_launcher_ends_when_the_last_line_of_those_who_have_ended_is_shown(tmp_path: pathlib.Path) -> None:
    """A screen that is slower than the member: its end is seen, and told, before its last lines are there."""
    goes_on = threading.Event()

    class Slow(Screen):
        def line(self, member: str, text: str) -> None:
            goes_on.wait(PATIENCE)
            super().line(member, text)

    screen, process = Slow(), Process(Play.plan("worker-0"), ends=False)
    lives = Lives(screen, tmp_path, Engine(lambda plan: process), lambda: None)  # type: ignore[arg-type]
    lives.begin(process.plan)
    process.says(b"".join(LINES))
    process.close()
    process.code = 0
    assert [code for _, code in lives.take_ended()] == [0] and not screen.lines
    late = threading.Timer(0.1, goes_on.set)
    late.start()
    lives.stop(0.0, asks=False)
    late.join()
    assert screen.lines == ["worker-0 speaks", *(line.decode().rstrip("\n") for line in LINES)]
