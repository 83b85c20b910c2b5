"""One commit's steps: told to count in the order of the clocks, ended by what is broken, silent once given up."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.core.rounds import RoundMembership
from syncline.core.wire.message import Done, Message
from syncline.core.wire.traffic import AskClip, Committed
from syncline.errors import ConnectionLost, Refresh, RuleError
from syncline.net.rpc import Call
from syncline.worker.exchange.commit import CommitFlow


class TwinEndpoint:
    """For a call that is answered by hand."""

    waiter_reads = False
    peer = "twin"


class TwinServerCommit:
    """Keeps what it is told."""

    def __init__(self, told: list[tuple[str, int]], name: str) -> None:
        self.told, self.name = told, name
        self.call: Any = None
        self.earlier: list[Call] = []
        self.answer: Committed | None = None
        self.clock = 0
        self.round_membership: RoundMembership | None = None

    def _made(self, verb: str) -> Call:
        self.told.append((f"{verb} {self.name}", self.clock))
        return Call(TwinEndpoint(), Message, ())  # type: ignore[arg-type]

    def stage(self) -> Call:
        return self._made("stage")

    def commit(self, clock: int, round_membership: RoundMembership | None = None) -> Call:
        self.round_membership = round_membership
        return self._made("commit")

    def clip(self, clock: int, squared_norm: float) -> Call:
        self.norm = squared_norm
        return self._made("clip")


def flow(told: list[tuple[str, int]], clock: int, before: CommitFlow | None = None, **more: Any) -> CommitFlow:
    server_commits = [TwinServerCommit(told, name) for name in "ab"]
    for server_commit in server_commits:
        server_commit.clock = clock
    made = CommitFlow(clock, server_commits, before, **more)
    made.start()
    return made


def answer(one: CommitFlow, *answers: Any) -> None:
    for server_commit, what in zip(one.server_commits, answers, strict=True):
        call: Any = server_commit.call
        if isinstance(what, Exception):
            call.finish(None, None, what)
        elif what is not None:
            call.finish(what, None, None)


def commits(told: list[tuple[str, int]]) -> list[int]:
    return [clock for verb, clock in told if verb == "commit a"]


def test_what_is_acknowledged_first_does_not_count_first() -> None:
    told: list[tuple[str, int]] = []
    first = flow(told, 1)
    second = flow(told, 2, first)
    third = flow(told, 3, second)
    answer(third, Done(), Done())
    answer(second, Done(), Done())
    assert commits(told) == []
    answer(first, Done(), Done())
    assert commits(told) == [1, 2, 3]
    for one in (third, first, second):
        answer(one, Committed(one.clock, []), Committed(one.clock, []))
        assert one.is_over and one.error is None


def test_behind_one_that_is_broken_nothing_counts() -> None:
    told: list[tuple[str, int]] = []
    first = flow(told, 1)
    second = flow(told, 2, first)
    answer(second, Done(), Done())
    answer(first, Done(), Refresh("moved"))
    assert isinstance(first.error, Refresh) and isinstance(second.error, Refresh) and commits(told) == []
    third = flow(told, 3, second)
    answer(third, Done(), Done())
    assert isinstance(third.error, Refresh) and commits(told) == []


@pytest.mark.parametrize("error", [ConnectionLost("gone"), Refresh("moved")])
@pytest.mark.parametrize("staged", [False, True])
def test_one_that_is_broken_ends_it_whatever_the_others_do(error: Exception, staged: bool) -> None:
    one = flow([], 1)
    if staged:
        answer(one, Done(), Done())
    answer(one, None, error)
    assert one.is_over and one.error is error


def test_another_error_is_told_when_all_have_answered() -> None:
    """What has not come yet may still land."""
    one = flow([], 1)
    answer(one, Done(), Done())
    answer(one, RuleError("cannot be applied"), None)
    assert not one.is_over
    answer(one, None, Committed(1, []))
    assert isinstance(one.error, RuleError)


def test_given_up_it_says_nothing_more() -> None:
    told: list[tuple[str, int]] = []
    one = flow(told, 1)
    one.give_up()
    answer(one, Done(), Done())
    assert commits(told) == []


def test_the_norm_of_a_step_made_anew_is_the_one_it_was_clipped_by() -> None:
    told: list[tuple[str, int]] = []
    one = flow(told, 1)
    answer(one, Done(), Done())
    answer(one, AskClip(1, 3.0), AskClip(1, 4.0))
    assert one.squared_norm == 7.0 and [verb for verb, _ in told[-2:]] == ["clip a", "clip b"]
    again = flow(told, 1, squared_norm=one.squared_norm)
    answer(again, Done(), Done())
    told.clear()
    answer(again, Committed(1, []), AskClip(1, 4.0))  # the other has applied it
    assert [verb for verb, _ in told] == ["clip b"] and again.server_commits[1].norm == 7.0  # type: ignore[attr-defined]
    answer(again, None, Committed(1, []))
    assert again.is_over and again.error is None
    unknown = flow(told, 1)
    answer(unknown, Done(), Done())
    answer(unknown, Committed(1, []), AskClip(1, 4.0))
    assert isinstance(unknown.error, ConnectionLost)  # asked again, until somebody who knows it has brought it


# -- with spare workers --------------------------------------------------------------------------------------

ROLL = RoundMembership(0, 1, [("worker-0", 1, 1)])


def spare_flow(told: list[tuple[str, int]]) -> Any:
    """`b` is the server that decides."""
    server_commits = [TwinServerCommit(told, name) for name in "abc"]
    made = CommitFlow(1, server_commits, decider=server_commits[1])
    made.start()
    answer(made, Done(), Done(), Done())
    return made


@pytest.mark.parametrize("first", [Committed(1, [], round_membership=ROLL), AskClip(1, 4.0, ROLL)])
def test_the_one_that_decides_is_told_first_and_the_others_by_its_word(first: Message) -> None:
    told: list[tuple[str, int]] = []
    one = spare_flow(told)
    assert [what for what, _ in told][3:] == ["commit b"]
    answer(one, None, first, None)
    assert [what for what, _ in told][4:] == ["commit a", "commit c"] and not one.is_over
    assert [server_commit.round_membership for server_commit in one.server_commits] == [ROLL, None, ROLL]
    if isinstance(first, AskClip):
        answer(one, AskClip(1, 3.0), None, AskClip(1, 2.0))
        assert [what for what, _ in told][6:] == ["clip a", "clip b", "clip c"] and one.squared_norm == 9.0
        answer(one, Committed(1, []), Committed(1, []), Committed(1, []))
    else:
        answer(one, Committed(1, []), None, Committed(1, []))
    assert (
        one.is_over
        and one.error is None
        and all(server_commit.answer is not None for server_commit in one.server_commits)
    )


@pytest.mark.parametrize("error", [ConnectionLost("gone"), Refresh("moved"), RuleError("cannot be applied")])
def test_when_nothing_was_decided_nobody_is_told(error: Exception) -> None:
    told: list[tuple[str, int]] = []
    one = spare_flow(told)
    answer(one, None, error, None)
    assert one.error is error and len(told) == 4


def test_who_reads_for_itself_waits_for_the_round_apart_from_the_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwinEndpoint, "waiter_reads", True)
    told: list[tuple[str, int]] = []
    one = spare_flow(told)
    one.wait_until_staged(0.0)
    assert one.waits_for_decision
    monkeypatch.setattr(
        one, "go_on", lambda seconds: answer(one, None, Committed(1, [], round_membership=ROLL), None) or True
    )  # what comes while it waits
    one.wait_until_decided(1.0)
    assert not one.waits_for_decision and [what for what, _ in told][4:] == ["commit a", "commit c"]


def test_given_up_before_it_was_decided_the_others_hear_nothing() -> None:
    told: list[tuple[str, int]] = []
    one = spare_flow(told)
    one.give_up()
    answer(one, None, Committed(1, [], round_membership=ROLL), None)
    assert len(told) == 4
