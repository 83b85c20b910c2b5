"""How often something is done, as people type it."""

from __future__ import annotations

import pytest

from syncline.core.checkpoint.schedule import Every, every
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("500steps", Every(steps=500)),
        ("1step", Every(steps=1)),
        ("10 steps", Every(steps=10)),
        ("1_000steps", Every(steps=1000)),
        ("10m", Every(seconds=600.0)),
        ("90s", Every(seconds=90.0)),
        ("1.5h", Every(seconds=5400.0)),
    ],
)
def test_steps_or_a_duration(text: str, meant: Every) -> None:
    assert every("--save-every", text) == meant


@pytest.mark.parametrize("text", ["", "steps", "0steps", "-1steps", "1.5steps", "10x", "0s", "٣steps", "nansteps"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--save-every .*500steps"):
        every("--save-every", text)
