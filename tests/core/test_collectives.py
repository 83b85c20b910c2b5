"""What ranks must agree on, and which bytes go from whom to whom."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from syncline.core.collectives import (
    check_heard,
    disagreement,
    even_parts,
    given,
    hosts_of,
    is_inline,
    result_of,
    share,
    wanted,
)
from syncline.core.wire.collectives import STRANGER, Describe
from syncline.errors import FrameError

GROUP = (3, 5, 9)


def said(verb: str, dtype: str = "float32", shape: Any = (4,), **fields: Any) -> Describe:
    return Describe(GROUP, 7, verb, dtype, shape, **fields)


@drawn(st.integers(0, 5000), st.integers(1, 9))
def test_shares_are_all_of_it_along_cache_lines(num_bytes: int, count: int) -> None:
    shares = [share(k, count, num_bytes) for k in range(count)]
    assert shares[0][0] == 0 and shares[-1][1] == num_bytes
    assert all(one[1] == two[0] for one, two in itertools.pairwise(shares))
    assert all(start % 64 == 0 or start == num_bytes for start, _ in shares)


def test_pieces_are_as_even_as_possible() -> None:
    assert even_parts((7, 2), 3) == ((3, 2), (2, 2), (2, 2))
    assert even_parts((1,), 3) == ((1,), (0,), (0,))


def test_what_goes_to_whom() -> None:
    """Offset and bytes, in what the source gives."""
    parts = ((1, 2), (0, 2), (3, 2))
    assert [wanted(said("all_to_all", parts=parts), 0, k) for k in range(3)] == [(0, 8), (8, 0), (8, 24)]
    assert [wanted(said("all_gather"), 1, k) for k in range(3)] == [(0, 16)] * 3
    assert [wanted(said("gather", root=5), 0, k) for k in range(3)] == [(0, 0), (0, 16), (0, 0)]
    assert [wanted(said("broadcast", root=5), k, 2) for k in range(3)] == [(0, 0), (0, 16), (0, 0)]
    scattered = said("scatter", parts=parts, root=3)
    assert [given(scattered, k) for k in range(3)] == [32, 0, 0]
    assert wanted(scattered, 0, 2) == (8, 24)
    assert is_inline(said("all_reduce", shape=(4096,)), 0) and not is_inline(said("all_reduce", shape=(4097,)), 0)


def test_hosts() -> None:
    """By who shares memory with whom; None where a host is not of one mind."""

    def on(*hosts: tuple[int, int]) -> list[Describe]:
        return [said("barrier", host=host, sharing=sharing) for host, sharing in hosts]

    assert hosts_of(on((3, 3), (3, 3), (3, 3))) == [[0, 1, 2]]
    assert hosts_of(on((3, 2), (5, 1), (3, 2))) == [[0, 2], [1]]
    assert hosts_of(on((3, 2), (3, 3), (5, 2))) is None


def test_agreement() -> None:
    names = ["worker-0", "worker-1", "worker-2"]
    one = said("all_gather", shape=(2, 3))
    assert disagreement(names, [one, said("all_gather", shape=(0, 3)), said("all_gather", shape=(9, 3))]) == ""
    assert result_of([one, one, one], 1) == ("float32", (6, 3))
    alone = said("all_gather", shape=())
    assert result_of([alone] * 3, 0) == ("float32", (3,))
    told = disagreement(names, [one, one, said("all_gather", shape=(2,))])
    assert told.startswith("worker-2 called all_gather of float32[2], worker-0 and worker-1 of float32[2, 3];")
    nothing, root = Describe(GROUP, 7, "broadcast", root=9), said("broadcast", root=9)
    assert disagreement(names, [nothing, root, root]) == ""
    assert disagreement(names, [nothing, said("broadcast", "int8", root=9), root]).startswith(
        "worker-1 called broadcast into int8[4], and gets float32[4] from worker-2"
    )


@pytest.mark.parametrize(
    "lie",
    [
        {"verb": "steal"},
        {"dtype": "object"},
        {"group": (3, 5)},
        {"group": (3, 9)},
        {"group": (3, 9, 9)},
        {"shape": (-1,)},
        {"shape": (1,) * 65},
        {"shape": (1 << 43, 8)},
        {"parts": ((1,), (1,))},
        {"number": -1},
        {"offset": -8},
    ],
    ids=str,
)
def test_lies_are_refused(lie: dict[str, Any]) -> None:
    honest = said("all_reduce")
    check_heard(honest, 3, 9)
    with pytest.raises(FrameError):
        check_heard(msgspec.structs.replace(honest, **lie), 5 if lie.get("group") == (3, 9) else 3, 9)


# -- scripts that are at the same place ------------------------------------------------------------------------


def level(*fields: dict[str, Any], verb: str = "barrier") -> str:
    return disagreement(["a", "b", "c"], [said(verb, "", (), **one) for one in fields])


def test_ranks_with_the_same_history_may_meet() -> None:
    """A failure that all have seen; one of b and c alone."""
    assert level({}, {}, {}) == ""
    assert level(*[{"attempt": 2, "failures": (1, 1, 1)}] * 3) == ""
    assert level({}, {"failures": (0, 1, 1)}, {"failures": (0, 1, 1)}) == ""


def test_ranks_with_different_histories_may_not() -> None:
    assert level({}, {}, {"failures": (0, 1, 1)}).startswith(
        "of the calls that b and c made together, 0 failed at b and 1 at c; their scripts are not at the same place"
    )
    assert level({"attempt": 1}, {"attempt": 1}, {}).startswith(
        "the workers have not restarted equally often (a 1, b 1, c 0); "
    )
    stranger = {"failures": (0, 0, STRANGER)}
    assert level({**stranger, "num_calls": 57}, {**stranger, "num_calls": 57}, {}).startswith(
        "c began its script after a and b had made 57 collective calls; "
    )
    assert level({**stranger, "num_calls": 1}, {**stranger, "num_calls": 2}, {}).startswith(
        "c began its script after a had made 1 collective call and b had made 2 collective calls; "
    )


def test_restart_is_for_those() -> None:
    assert level({"attempt": 3, "failures": (0, 2, STRANGER)}, {"failures": (1, 0, 0)}, {}, verb="restart") == ""


def test_a_peer_that_lies_about_failures() -> None:
    with pytest.raises(FrameError, match="another number of members"):
        check_heard(said("barrier", "", (), failures=(1, 2)), GROUP[0], GROUP[1])
