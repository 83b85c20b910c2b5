"""What is said about checkpoints and cannot be is refused before anything starts."""

from __future__ import annotations

import pathlib

import pytest
from tests.cli.test_bad_input import refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--save-every", "soon", "--checkpoint", "saves"), "--save-every 'soon': give a duration"),
        (("--save-every", "0steps", "--checkpoint", "saves"), "--save-every '0steps': give a number of steps"),
        (("--save-every", "5m"), "--save-every needs to know where to save: use --checkpoint DIR"),
        (("--fresh", "--resume", "x", "--checkpoint", "saves"), "--fresh and --resume cannot be combined"),
        (("--resume", "nothing"), "--resume nothing: there is no checkpoint"),
        (("--checkpoint", "train.py/saves"), "train.py/saves"),
        (("--checkpoint", "nowhere://x"), "nowhere://"),
        (("--checkpoint", "saves", "--checkpoint-mirror", "train.py/saves"), "train.py/saves"),
        (("--save-memory", "much"), "--save-memory 'much': give a size"),
        (("--keep", "1"), "keep = 1: must be at least 2"),
    ],
)
def test_what_cannot_be_is_said_at_launch(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    flags: tuple[str, ...],
    words: str,
) -> None:
    assert words in refused(capsys, monkeypatch, tmp_path, "run", *flags, "train.py")
