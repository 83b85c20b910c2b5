"""Which cores are whose: everybody's own, none twice, none left over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.core.cores import describe, own_cores, why_shared


@given(st.integers(1, 200), st.integers(0, 6), st.integers(1, 16))
def test_nobody_shares_and_nothing_is_left_over(count: int, servers: int, workers: int) -> None:
    cores = list(range(3, 3 + count))
    parts = [own_cores(cores, place, servers, workers) for place in range(servers + workers)]
    if count < servers + workers:
        assert not any(parts)
        return
    assert sorted(core for part in parts for core in part) == cores and all(parts)
    sizes = [len(part) for part in parts[servers:]]
    assert max(sizes) - min(sizes) <= 1
    assert len({len(part) for part in parts[:servers]}) <= 1


def test_a_server_beside_workers() -> None:
    assert [own_cores(range(8), place, 1, 3) for place in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert own_cores(range(4), 0, 1, 3) == [0]
    assert own_cores(range(16), 5, 1, 3) == [], "who comes later shares what there is"


def test_too_few_cores_are_said_to_be() -> None:
    assert why_shared(3, 1, 2) == ""
    assert why_shared(2, 1, 2) == (
        "--cores auto: 2 cores for 1 server and 2 workers: too few for each to have its own, so all share them"
    )
    assert why_shared(1, 0, 2).startswith("--cores auto: 1 core for 2 workers: ")


@pytest.mark.parametrize(("cores", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 8], "0-2,8")])
def test_as_tools_write_it(cores: list[int], text: str) -> None:
    assert describe(cores) == text
