"""The cut by itself: when servers are level, and what of the samples is done there."""

from __future__ import annotations

from syncline.core.checkpoint.snapshot import SNAPSHOT_SECONDS, SnapshotAttempt, ledger_at, ledger_to_resume
from syncline.core.leasing.leases import LeaseState, Leasing
from syncline.core.leasing.loader import Loader
from syncline.core.leasing.ranges import Span, count
from syncline.core.wire.checkpoints import Noted, SnapshotBarrierClosed

A, B = ("worker-0", 1), ("worker-1", 2)


def closed(*clocks: tuple[str, int, int], **rest: object) -> SnapshotBarrierClosed:
    return SnapshotBarrierClosed(list(clocks), **rest)  # type: ignore[arg-type]


def test_equal_clocks_are_level_and_a_worker_that_is_missing_has_none() -> None:
    cut = SnapshotAttempt(3, ["server-1", "server-0"], until=SNAPSHOT_SECONDS)
    assert cut.close().through == []
    answers = {"server-0": closed((*A, 4), (*B, 0)), "server-1": closed((*A, 4))}
    assert cut.decide(answers, 0.0) == "level"
    assert cut.clocks == {A: 4}


def test_what_any_server_has_all_are_told_to_let_in() -> None:
    cut = SnapshotAttempt(3, ["server-0", "server-1"], until=SNAPSHOT_SECONDS)
    answers = {"server-0": closed((*A, 4), (*B, 5)), "server-1": closed((*A, 5), (*B, 5))}
    assert cut.decide(answers, 0.0) == "further"
    assert (cut.close().turn, cut.close().through) == (1, [(*A, 5), (*B, 5)])
    assert cut.behind() == ["worker-0"]
    assert cut.decide(answers, SNAPSHOT_SECONDS) == "late", "commits have waited enough"
    level = {"server-0": closed((*A, 5), (*B, 5)), "server-1": closed((*A, 5), (*B, 5))}
    assert cut.decide(level, SNAPSHOT_SECONDS) == "level", "it is level after all: that is all that was wanted"


def test_a_step_that_some_slices_of_one_server_lack_is_let_in_first() -> None:
    cut = SnapshotAttempt(3, ["server-0", "server-1"], until=SNAPSHOT_SECONDS)
    torn = {"server-0": closed((*A, 5), behind=[(*A, 4)]), "server-1": closed((*A, 5))}
    assert cut.decide(torn, 0.0) == "further" and cut.close().through == [(*A, 5)]
    assert cut.behind() == ["worker-0"]
    assert cut.decide({"server-0": closed((*A, 5)), "server-1": closed((*A, 5))}, 0.0) == "level"


def test_what_was_committed_before_there_were_slices_of_its_kind_is_not_for_them() -> None:
    """worker-0 rests since it knew of one segment; all of server-1's slices are of the second."""
    cut = SnapshotAttempt(3, ["server-0", "server-1"], until=SNAPSHOT_SECONDS)
    one, two = closed((*A, 5), (*B, 7), registered=[(*A, 1), (*B, 2)]), closed((*B, 7), first_segment=1)
    assert cut.decide({"server-0": one, "server-1": two}, 0.0) == "level" and cut.clocks == {A: 5, B: 7}
    two = closed((*B, 6), first_segment=1)
    assert cut.decide({"server-0": one, "server-1": two}, 0.0) == "further"
    assert cut.close().through == [(*B, 7)] and cut.behind() == ["worker-1"]
    one = closed((*A, 5), (*B, 7), registered=[(*A, 2), (*B, 2)])
    assert cut.decide({"server-0": one, "server-1": two}, 0.0) == "further", "it may be on its way"
    assert cut.close().through == [(*A, 5), (*B, 7)]


def test_between_two_commits_of_a_batch_is_no_cut() -> None:
    cut = SnapshotAttempt(3, ["server-0", "server-1"], SNAPSHOT_SECONDS, {A: Noted(4, 2), B: Noted(4, 1)})
    level = dict.fromkeys(cut.servers, closed((*A, 5), (*B, 5)))
    assert cut.decide(level, 0.0) == "further"
    assert (cut.close().turn, cut.close().through) == (1, [(*A, 6), (*B, 5)])
    assert cut.behind() == ["worker-0"]
    assert cut.decide(level, SNAPSHOT_SECONDS) == "level", "commits have waited enough"
    assert cut.clocks == {A: 5, B: 5}
    assert cut.decide(dict.fromkeys(cut.servers, closed((*A, 6), (*B, 6))), 0.0) == "level"
    noted = SnapshotAttempt(3, ["server-0"], SNAPSHOT_SECONDS, {A: Noted(4, 3)})
    assert noted.decide({"server-0": closed((*A, 2))}, 0.0) == "further"
    assert noted.close().through == [(*A, 4)], "what was noted first lies before nothing that is in"


def test_a_first_batch_has_as_many_commits_as_those_of_others() -> None:
    cut = SnapshotAttempt(3, ["server-0"], SNAPSHOT_SECONDS, {A: Noted(4, 2), B: Noted(0, 0)})
    assert cut.decide({"server-0": closed((*A, 6), (*B, 1))}, 0.0) == "further"
    assert cut.close().through == [(*A, 6), (*B, 2)]
    alone = SnapshotAttempt(3, ["server-0"], SNAPSHOT_SECONDS, {B: Noted(0, 0)})
    assert alone.decide({"server-0": closed((*B, 1))}, 0.0) == "level"


def test_a_server_without_slices_has_no_say() -> None:
    cut = SnapshotAttempt(1, ["server-0", "server-1"], until=SNAPSHOT_SECONDS)
    answers = {"server-0": closed((*A, 2), num_updates=2, acks=[(1, 0, 4)]), "server-1": closed(has_slices=False)}
    assert cut.decide(answers, 0.0) == "level"
    assert (cut.num_updates, cut.acks) == (2, [(1, 0, 4)])


def leases(num_samples: int = 24, batch: int = 4) -> tuple[LeaseState, Leasing]:
    state = LeaseState()
    leasing = Leasing(state, in_rounds=True)
    for owner in (A, B):
        leasing.open(owner, "train", 0, Loader(num_samples, batch), 2)
    for owner in (A, B):
        assert leasing.ask(owner, "train", 0, [A, B]).lease is not None
    return state, leasing


def test_what_servers_said_at_the_cut_is_done_in_the_copy_only() -> None:
    state, _ = leases()
    saved = ledger_at(state, [(1, 0, 4), (2, 0, 4)], [])
    assert saved.epochs["train"][0].num_done == 8
    assert state.epochs["train"][0].num_done == 0, "the job's own ledger hears of it in its own time"


def test_what_was_leased_is_to_do_and_global_batches_are_the_same() -> None:
    """The first round is in: whoever takes this up deals out from the second on, in one piece."""
    state, _ = leases()
    found = ledger_to_resume(ledger_at(state, [(1, 0, 4), (2, 0, 4)], []))
    epoch = found.epochs["train"][0]
    assert not epoch.leases and epoch.todo == [Span(8, 24)]
    assert found.next_lease == state.next_lease > 2, "numbers of leases go on: old uses mean old leases"


def test_what_was_late_is_to_do() -> None:
    state, _ = leases()
    epoch = ledger_to_resume(ledger_at(state, [(1, 0, 4)], [(2, 0, 4)])).epochs["train"][0]
    assert count(epoch.todo) == 20 and epoch.num_done == 4


def test_an_epoch_that_ended_but_for_what_was_held_is_read_on() -> None:
    """It was read and in no commit yet, and the others have gone on: of a checkpoint it is lost, so it is to do."""
    state, leasing = leases(num_samples=8)
    leasing.used([(1, 0, 4)])
    answer = leasing.ask(A, "train", 0, [A, B], newest=1)
    assert not answer.is_finished
    assert leasing.ask(B, "train", 0, [A, B], held=[(2, 0, 4)], newest=2).is_finished
    assert state.finished["train"] == [(0, 1)]
    found = ledger_to_resume(ledger_at(state, [], []))
    assert found.finished["train"] == [] and found.epochs["train"][0].todo == [Span(4, 8)]


def test_an_epoch_of_which_all_is_done_is_finished() -> None:
    state, _ = leases(num_samples=8)
    found = ledger_to_resume(ledger_at(state, [(1, 0, 4), (2, 0, 4)], []))
    assert found.finished == {"train": [(0, 1)]} and not found.epochs["train"]
