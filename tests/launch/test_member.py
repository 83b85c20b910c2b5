"""How a worker's script ends, as its process tells it."""

from __future__ import annotations

import pytest

from syncline.launch.member import exit_code


@pytest.mark.parametrize(
    ("said", "code", "written"), [(7, 7, ""), (0, 0, ""), (None, 0, ""), ("no data", 1, "no data\n")]
)
def test_the_scripts_own_exit_code_is_the_processs(
    said: object, code: int, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the launcher makes of it: tests/launch/test_launcher.py."""
    assert exit_code(SystemExit(said)) == code
    assert capsys.readouterr().err == written
