"""Boundaries: where a script waits for others is one, but for in a loop, whose batch is read already."""

from __future__ import annotations

from tests.leased import FakeScript

from syncline.worker.checkpoint.boundary import Boundary, Position


class Noting:
    def __init__(self) -> None:
        self.seen: list[tuple[Position, int]] = []

    def at(self, position: Position, after: int, clock: int, *, waits: bool) -> None:
        self.seen.append((position, clock))

    def handed_out(self) -> None: ...


def test_a_barrier_in_a_loop_is_no_boundary() -> None:
    """What the script does behind it, and before it comes for its next batch, belongs to the batch before."""
    noting, script = Noting(), FakeScript(clock=7, num_loops=1)
    boundary = Boundary(script, script)
    boundary.watch(noting)
    with boundary.standing(boundary.place("barrier", "x")):
        boundary.look_where_it_waits()
    assert not noting.seen
    script.num_loops = 0
    with boundary.standing(boundary.place("barrier", "x")):
        boundary.look_where_it_waits()
    assert set(noting.seen) == {(("barrier", "x", 1), 7)}


def test_barriers_of_batches_that_are_done_are_not_counted() -> None:
    """A job that takes a checkpoint up does not come to them again: the next outside of loops has the same turn."""
    script = FakeScript()
    boundary = Boundary(script, script)
    assert boundary.place("barrier", "x") == ("barrier", "x", 1)
    script.num_loops = 1
    boundary.place("barrier", "x"), boundary.place("barrier", "x")
    script.num_loops = 0
    assert boundary.place("barrier", "x") == ("barrier", "x", 2)
    assert boundary.place("barrier", "y") == ("barrier", "y", 1)
