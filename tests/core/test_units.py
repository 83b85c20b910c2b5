"""How often something is done, as people type it."""

from __future__ import annotations

import pytest

from syncline.core.units import Interval, interval
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("500steps", Interval(steps=500)),
        ("1step", Interval(steps=1)),
        ("10 steps", Interval(steps=10)),
        ("1_000steps", Interval(steps=1000)),
        (" 1_000_000 steps", Interval(steps=1_000_000)),
        ("10m", Interval(seconds=600.0)),
        ("90s", Interval(seconds=90.0)),
        ("1.5h", Interval(seconds=5400.0)),
    ],
)
def test_steps_or_a_duration(text: str, meant: Interval) -> None:
    assert interval("--save-every", text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "steps",
        "0steps",
        "-1steps",
        "1.5steps",
        "10x",
        "0s",
        "٣steps",
        "nansteps",
        "_1steps",
        "1_steps",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--save-every .*500steps"):
        interval("--save-every", text)
