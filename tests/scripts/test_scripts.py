"""Scripts as people write them: a cross-section of tests/proof/test_script_matrix.py."""

from __future__ import annotations

import pathlib

import pytest
from tests.scripts.runner import (
    SCRIPTS,
    Kill,
    check,
    check_equal_to_plain,
    check_equal_within_tolerance,
    one_process,
    play,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param("stream", marks=pytest.mark.proof), "lstm"])
def test_alone_a_script_has_the_numbers_of_plain_torch_bit_for_bit(name: str, tmp_path: pathlib.Path) -> None:
    script = SCRIPTS[name]
    ended = play(script, "alone", tmp_path / "alone")
    check_equal_to_plain(ended, one_process(script, tmp_path / "plain"))


@pytest.mark.parametrize(
    ("name", "way"), [("mnist", "sync"), pytest.param("recommender", "ring", marks=pytest.mark.proof)]
)
def test_in_rounds_two_workers_have_the_numbers_of_one_process(name: str, way: str, tmp_path: pathlib.Path) -> None:
    script = SCRIPTS[name]
    assert script.equal is not None
    ended = play(script, way, tmp_path / "job", script.equal[0])
    check_equal_within_tolerance(ended, one_process(script, tmp_path / "plain", script.equal[1]))


@pytest.mark.parametrize(
    ("name", "way", "kill", "thinks"),
    [
        ("reinforce", "sync", Kill("worker-1", 7), 0.0),
        ("lstm", "bounded:2", Kill("worker-1", 23), 0.05),  # it comes back while the others are at work
        pytest.param("stream", "sync", Kill("worker-1", 5, at_any_moment=True), 0.0, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_a_script_trains_no_more_and_no_less_than_it_asks_for(
    name: str, way: str, kill: Kill | None, thinks: float, tmp_path: pathlib.Path
) -> None:
    script = SCRIPTS[name]
    ended = play(script, way, tmp_path / "job", kill=kill, thinks=thinks)
    check(script, way, ended, one_process(script, tmp_path / "plain"), kill)
