"""Registrations: the chief's make the layout, in whatever order the others come."""

from __future__ import annotations

import itertools

import pytest

from syncline.core.layout import Parameter
from syncline.core.registry import RegistrationDecision, Registry
from syncline.core.rule import Rule
from syncline.errors import LayoutError, RuleError

SGD = [Rule("SGD", lr=1.0).spec]
W, B, C = Parameter("w", "float32", (4,)), Parameter("b", "float32", (2,)), Parameter("c", "float32", (9,))


def registry() -> Registry:
    return Registry(["server-0", "server-1"], 4096)


def ask(known: Registry, who: str, ordinal: int, *parameters: Parameter) -> RegistrationDecision:
    return known.register(who, who == "worker-0", ordinal, parameters, SGD, "mean")


def test_the_chiefs_registration_makes_the_layout() -> None:
    known = registry()
    decision = ask(known, "worker-0", 0, W, B)
    assert decision.kind == "create" and decision.segment is known.layout.segments[0]
    assert {known.replica_sets[part.id].primary for part in decision.segment.slices} == {"server-0", "server-1"}
    assert known.layout.where["b"][0] is decision.segment


def test_who_comes_before_the_chief_waits_and_says_for_what() -> None:
    """Registered by whoever comes first, the first values would be anybody's."""
    decision = ask(registry(), "worker-1", 0, W, B)
    assert (decision.kind, decision.reason) == ("wait", "the chief has not registered w, b yet")


def test_nobody_goes_on_before_the_chiefs_values_are_on_the_servers() -> None:
    """Between the layout and the upload the servers hold zeros: a pull then would start a worker from zero."""
    known = registry()
    ask(known, "worker-0", 0, W)
    early = ask(known, "worker-1", 0, W)
    assert (early.kind, early.reason) == ("wait", "the chief's values are on their way")
    known.ready.add(0)
    assert ask(known, "worker-1", 0, W).kind == "known"
    assert ask(known, "worker-0", 1, W).kind == "known", "the chief again, the same: nothing new"
    assert len(known.layout.segments) == 1


@pytest.mark.parametrize("chief_first", [True, False])
def test_another_shape_is_refused_whoever_comes_first(chief_first: bool) -> None:
    known, other = registry(), Parameter("w", "float32", (5,))
    if not chief_first:
        assert ask(known, "worker-1", 0, other).kind == "wait"
    ask(known, "worker-0", 0, W)
    with pytest.raises(LayoutError) as caught:
        ask(known, "worker-1", 0, other)
    assert str(caught.value) == (
        "worker-1 registered 'w' as float32[5], the job has float32[4]; "
        "start worker-1 with the same model as the rest of the job"
    )


def test_a_parameter_that_the_job_does_not_have_is_refused() -> None:
    known = registry()
    ask(known, "worker-0", 0, W)
    with pytest.raises(
        LayoutError, match=r"worker-1 registered 'b' as float32\[2\], the job has no parameter of that"
    ):
        ask(known, "worker-1", 0, W, B)


def test_a_parameter_that_is_missing_is_refused() -> None:
    """A worker without it would push zeros' worth of it in silence."""
    known = registry()
    ask(known, "worker-0", 0, W, B)
    with pytest.raises(LayoutError, match=r"worker-1 did not register 'b', the job has it as float32\[2\]; start"):
        ask(known, "worker-1", 0, W)


def test_calling_again_adds_a_segment_and_moves_nothing() -> None:
    known = registry()
    first = ask(known, "worker-0", 0, W, B).segment
    second = ask(known, "worker-0", 1, C).segment
    assert first is not None and second is not None
    assert known.layout.segments == [first, second]
    assert (second.index, second.first_parameter) == (1, 2)
    assert [p.id for p in known.layout.slices()] == list(range(known.layout.num_slices))


def test_the_second_registration_waits_for_the_chiefs_second() -> None:
    """A worker that is ahead of the chief by one register() is early, not wrong."""
    known = registry()
    ask(known, "worker-0", 0, W)
    known.ready.add(0)
    assert ask(known, "worker-1", 0, W).kind == "known"
    ahead = ask(known, "worker-1", 1, C)
    assert (ahead.kind, ahead.reason) == ("wait", "the chief has not registered c yet")
    ask(known, "worker-0", 1, C)
    known.ready.add(1)
    assert ask(known, "worker-1", 1, C).kind == "known"


@pytest.mark.parametrize("late", [False, True])
def test_two_registrations_in_one_are_refused_early_and_late(late: bool) -> None:
    """Whether the chief has made its second registration by then must not decide between error and success."""
    known = registry()
    ask(known, "worker-0", 0, W)
    if late:
        ask(known, "worker-0", 1, B)
        known.ready.update({0, 1})
    with pytest.raises(LayoutError, match="worker-1 registered 'b'"):
        ask(known, "worker-1", 0, W, B)


def test_the_chief_cannot_move_what_is_registered() -> None:
    known = registry()
    ask(known, "worker-0", 0, W)
    with pytest.raises(LayoutError, match="'w' is registered already; register new parameters separately"):
        ask(known, "worker-0", 1, W, C)
    with pytest.raises(LayoutError, match=r"worker-0 registered 'w' as float32\[9\], the job has float32\[4\]"):
        ask(known, "worker-0", 1, Parameter("w", "float32", (9,)))
    assert len(known.layout.segments) == 1


@pytest.mark.parametrize("who", ["worker-0", "worker-1"])
def test_what_cannot_be_is_refused_from_anyone_and_leaves_no_trace(who: str) -> None:
    known = registry()
    with pytest.raises(LayoutError, match="two parameters are named 'w'"):
        ask(known, who, 0, W, W)
    with pytest.raises(RuleError, match="integers take Add or Assign"):
        ask(known, who, 0, Parameter("n", "int64", (1,)))
    with pytest.raises(LayoutError, match="reduce = 'max'"):
        known.register(who, True, 0, [W], SGD, "max")
    assert known.layout.segments == []


@pytest.mark.parametrize("order", sorted(set(itertools.permutations(["chief", "one", "two"]))))
def test_the_layout_does_not_depend_on_the_order_of_coming(order: tuple[str, ...]) -> None:
    known, reference = registry(), registry()
    ask(reference, "worker-0", 0, W, B)
    names = {"chief": "worker-0", "one": "worker-1", "two": "worker-2"}
    # Others list their parameters in another order: the chief's counts.
    kinds = [ask(known, names[who], 0, *((W, B) if who == "chief" else (B, W))).kind for who in order]
    assert kinds.count("create") == 1 and kinds.count("wait") == 2
    assert known.layout.segments == reference.layout.segments


def test_a_segment_that_could_not_be_hosted_leaves_no_trace() -> None:
    """Too little memory on one server: the chief hears of it, and may register again, smaller."""
    known = registry()
    ask(known, "worker-0", 0, W, B)
    before = (
        list(known.layout.segments),
        dict(known.layout.where),
        known.layout.num_slices,
        dict(known.replica_sets),
    )
    failed = ask(known, "worker-0", 1, C).segment
    assert failed is not None
    known.take_back(failed)
    assert before == (known.layout.segments, known.layout.where, known.layout.num_slices, known.replica_sets)
    known.take_back(failed)
    assert len(known.layout.segments) == 1, "taken back once"
    again = ask(known, "worker-0", 1, C)
    assert again.kind == "create" and again.segment == failed
