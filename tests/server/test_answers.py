"""Answers in parts: every slice goes out once, after it was applied, and the end after all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline.core.wire.traffic import Committed
from syncline.net.transport import buffer_of
from syncline.server import replies
from syncline.server.replies import PartialAnswer
from syncline.server.slices import Snapshot

BIG = replies.FRAME_BYTES // 4


class Slot:
    """A hosted slice, as far as an answer looks at it."""

    def __init__(self, number: int, num_bytes: int = BIG) -> None:
        self.memory = np.full(num_bytes, number, np.uint8)
        self.part = type("Part", (), {"id": number, "num_bytes": num_bytes})()
        self.state = type("State", (), {"version": 10 + number, "seen": {}})()

    def show(self) -> None:
        """Its memory is up to date."""

    def copy_into(self, target: memoryview) -> int:
        target[:] = buffer_of(self.memory)
        return 100 + self.part.id

    def copy_locked(self, target: memoryview) -> int:
        target[:] = buffer_of(self.memory)
        return 200 + self.part.id


class Request:
    """Keeps what is sent, in order; each frame as (is it the end, slices, versions, first byte of each buffer)."""

    peer = type("Peer", (), {"name": "worker-0"})()

    def __init__(self) -> None:
        self.frames: list[tuple[bool, list[int], list[int], list[int]]] = []
        self.held: list[int] = []

    def hold(self, num_bytes: int) -> None:
        self.held.append(num_bytes)

    def sent(self) -> list[int]:
        return [number for frame in self.frames for number in frame[1]]

    def _keep(self, end: bool, answer: Committed, buffers: Any, num_bytes: int) -> None:
        assert num_bytes == sum(map(len, buffers))
        self.frames.append((end, answer.slices, answer.versions, [buffer[0] for buffer in buffers]))

    def reply_part(self, answer: Committed, buffers: Any = (), payload_bytes: int = 0) -> None:
        self._keep(False, answer, buffers, payload_bytes)

    def reply(self, answer: Committed, buffers: Any = (), payload_bytes: int = 0) -> None:
        self._keep(True, answer, buffers, payload_bytes)


class Sender:
    """Keeps what is handed over to another thread until the test runs it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def answer_of(pull: list[int], make: Any = None) -> tuple[Any, Request, Sender, list[int]]:
    request, sender, copied = Request(), Sender(), list[int]()
    made: Any = PartialAnswer(
        request, 5, pull, make, submit=sender.waiting.append, copied=copied.append, hold=request.hold
    )  # type: ignore[arg-type]
    return made, request, sender, copied


def test_slices_go_out_as_they_are_applied_and_the_rest_with_the_end() -> None:
    answer, request, sender, _ = answer_of([1, 2, 3])
    answer.applied(Slot(2))
    sender.run()
    assert request.frames == [(False, [2], [12], [2])]
    answer.applied(Slot(1))
    answer.applied(Slot(3))
    answer.finish()
    sender.run()
    assert [frame[1] for frame in request.frames] in ([[2], [1, 3]], [[2], [1, 3], []])
    assert [frame[0] for frame in request.frames][-1] is True


def test_each_slice_goes_out_once_and_only_if_it_was_asked_for() -> None:
    answer, request, sender, _ = answer_of([1])
    for slot in (Slot(1), Slot(1), Slot(9)):
        answer.applied(slot)
    sender.run()
    answer.applied(Slot(1))
    answer.finish()
    sender.run()
    assert request.sent() == [1]


def test_a_frame_does_not_grow_without_bound() -> None:
    answer, request, sender, _ = answer_of(list(range(10)))
    for number in range(10):
        answer.applied(Slot(number))
    answer.finish()
    sender.run()
    assert request.sent() == list(range(10))
    assert max(len(frame[1]) for frame in request.frames) * BIG <= replies.FRAME_BYTES


def test_a_small_answer_is_one_frame_and_needs_no_other_thread() -> None:
    answer, request, sender, _ = answer_of([1, 2])
    answer.applied(Slot(1, 100))
    answer.applied(Slot(2, 100))
    assert not sender.waiting and not request.frames
    answer.finish()
    assert request.frames == [(True, [1, 2], [11, 12], [1, 2])] and not sender.waiting


def test_what_others_may_write_is_copied_before_it_is_sent() -> None:
    """And the version is that of the copy, not of a moment before."""
    answer, request, sender, copied = answer_of([1], lambda part: memoryview(bytearray(part.num_bytes)))
    slot = Slot(1)
    answer.applied(slot)
    answer.finish()
    sender.run()
    assert request.frames[0][1:] == ([1], [101], [1])
    assert copied == [BIG] and slot.state.seen == {"worker-0": 101}


def test_whoever_holds_the_lock_copies_without_it() -> None:
    """The thread that has just applied a slice holds its lock: to take it again would wait for ever."""
    answer, request, sender, _ = answer_of([1], lambda part: memoryview(bytearray(part.num_bytes)))
    answer.applied(Slot(1), locked=True)
    answer.finish()
    sender.run()
    assert request.frames[0][1:] == ([1], [201], [1])


def shared_by(num_users: int, slot: Any) -> Snapshot:
    slot.spare = getattr(slot, "spare", [])
    return Snapshot(slot, num_users)


def test_several_answers_share_one_copy_whose_memory_is_used_again_when_all_have_sent_it() -> None:
    slot: Any = Slot(1)
    make = lambda part: memoryview(bytearray(part.num_bytes))  # noqa: E731
    (one, at_one, send_one, copied), (two, at_two, send_two, _) = answer_of([1], make), answer_of([1], make)
    snapshot = shared_by(2, slot)
    for answer in (one, two):
        assert answer.copies
        answer.applied(slot, snapshot=snapshot, locked=True)
    slot.memory[:] = 99  # the next update
    send_one.run()
    assert slot.spare == []  # the other still has to send it
    send_two.run()
    assert at_one.frames == at_two.frames == [(False, [1], [201], [1])] and copied == []
    assert len(slot.spare) == 1
    assert shared_by(1, slot).buffer[0] == 99 and slot.spare == []


def test_a_copy_that_is_not_sent_after_all_is_given_back() -> None:
    """By an answer that ends with a refusal, and by one that has the slice already."""
    slot: Any = Slot(1)
    make = lambda part: memoryview(bytearray(part.num_bytes))  # noqa: E731
    refused, _, sender, _ = answer_of([1], make)
    again, _, sender_again, _ = answer_of([1], make)
    again.applied(slot)
    snapshot = shared_by(2, slot)
    refused.applied(slot, snapshot=snapshot, locked=True)
    again.applied(slot, snapshot=snapshot, locked=True)
    refused.finish(lambda: None)
    sender.run()
    sender_again.run()
    assert len(slot.spare) == 1


def test_shared_memory_is_only_named() -> None:
    answer, request, sender, _ = answer_of([])
    answer.applied(Slot(4))
    sender.run()
    assert request.frames == [(False, [4], [14], [])]


def test_a_refusal_is_the_end_and_nothing_comes_after_it() -> None:
    answer, request, sender, _ = answer_of([1, 2, 3])
    ends: list[int] = []
    answer.applied(Slot(1))
    answer.finish(lambda: ends.append(len(request.frames)))
    sender.run()
    answer.applied(Slot(2))
    sender.run()
    assert ends == [0] and request.frames == []


def test_bytes_are_held_until_they_are_sent_dropped_or_refused() -> None:
    """What is counted as outstanding and never let go would, in the end, cut off a worker that reads."""
    answer, request, sender, _ = answer_of([1, 2, 3])
    answer.applied(Slot(1))
    answer.applied(Slot(9))  # was not asked for
    assert request.held == [BIG]
    sender.run()
    assert sum(request.held) == 0
    answer.applied(Slot(2))
    answer.applied(Slot(3, 100))
    assert sum(request.held) == BIG + 100
    answer.finish()
    sender.run()
    assert sum(request.held) == 0 and request.sent() == [1, 2, 3]

    refused, request, sender, _ = answer_of([1, 2, 3])
    refused.applied(Slot(1))
    refused.finish(lambda: None)
    assert sum(request.held) == 0
    refused.applied(Slot(2))  # by a thread that did not know of it yet
    sender.run()
    assert sum(request.held) == 0 and len(request.held) == 4

    broken, request, sender, _ = answer_of([1])
    request.reply_part = None  # type: ignore[assignment, method-assign]
    broken.applied(Slot(1))
    with pytest.raises(TypeError):
        sender.run()
    assert sum(request.held) == 0


def test_shared_memory_that_is_only_named_holds_nothing() -> None:
    answer, request, sender, _ = answer_of([])
    answer.applied(Slot(4))
    answer.finish()
    sender.run()
    assert request.held == []


def applied_by_many_threads() -> Request:
    request, sending = Request(), list[threading.Thread]()

    def submit(send: Callable[[], None]) -> None:
        sending.append(threading.Thread(target=send, name="Thread-send"))
        sending[-1].start()

    answer: Any = PartialAnswer(
        request, 5, [0, 1, 2, 3], None, submit=submit, copied=lambda n: None, hold=request.hold
    )  # type: ignore[arg-type]
    slots = [Slot(number, 1 << 17) for number in range(4)]
    applying = [threading.Thread(target=answer.applied, args=(slot,), name="Thread-apply") for slot in slots]
    for thread in applying:
        thread.start()
    for thread in applying:
        thread.join()
    answer.finish()
    for thread in list(sending):
        thread.join()
    return request


def test_many_threads_apply_while_one_sends() -> None:
    """Nothing is lost or doubled between the thread that finds nothing to send and the one that brings something."""
    for _ in range(500):
        request = applied_by_many_threads()
        assert sorted(request.sent()) == [0, 1, 2, 3]
        assert [frame[0] for frame in request.frames].count(True) == 1 and request.frames[-1][0]
        assert sum(request.held) == 0
