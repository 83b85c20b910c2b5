"""Which checkpoints may go."""

from __future__ import annotations

import msgspec

from syncline.core.checkpoint.schedule import Checkpoint, SaveStanding, SaveState, outdated


def standings(text: str, lineage: str = "a") -> list[SaveStanding]:
    """s: sound, d: damaged, u: unfinished; oldest first."""
    return [SaveStanding(str(n), n, lineage, kind == "s", kind == "u") for n, kind in enumerate(text, 1)]


def test_the_newest_and_the_best_stay() -> None:
    assert outdated(standings("sssss"), 3, "a", ()) == ["1", "2"]
    assert outdated(standings("sssss"), 3, "a", {"1"}) == ["2"]


def test_two_sound_ones_stay_whatever_is_asked_for() -> None:
    assert outdated(standings("sss"), 0, "a", ()) == ["1"]
    assert outdated(standings("s"), 0, "a", ()) == []
    assert outdated(standings("ds"), 2, "a", ()) == []


def test_what_is_damaged_is_no_replacement() -> None:
    assert outdated(standings("ssddd"), 2, "a", ()) == []
    assert outdated(standings("sssdd"), 2, "a", ()) == ["1"]
    assert outdated(standings("ddd"), 2, "a", ()) == []


def test_a_try_that_came_to_no_end_goes_when_a_newer_one_is_sound() -> None:
    assert outdated(standings("us"), 3, "a", ()) == ["1"]
    assert outdated(standings("su"), 3, "a", ()) == []
    assert outdated(standings("uu"), 3, "a", ()) == []


def test_other_lineages_are_left_alone() -> None:
    assert outdated(standings("ssssus", "b"), 2, "a", ()) == []
    assert outdated(standings("ssssus", ""), 2, "", ()) == []


def test_where_a_job_came_from_is_read_from_older_journals() -> None:
    """Under the name that they have for it: an unknown one would be dropped, and parameters not restored."""
    state = SaveState(resumed_from=Checkpoint("root", "folder", "step-7", "digest", 7))
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
    assert "taken_up" in written and "resumed_from" not in written
    assert msgspec.convert(written, SaveState).resumed_from == state.resumed_from
