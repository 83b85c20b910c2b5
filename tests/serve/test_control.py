"""What `serve-ctl` speaks to: every caller is answered, whatever the others do."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.errors import ConfigError
from syncline.serve.control import Control, ControlRequest, ask, control_socket


@contextlib.contextmanager
def controlled(folder: pathlib.Path, answer: Callable[[ControlRequest], dict[str, Any]]) -> Iterator[pathlib.Path]:
    with control_socket(folder) as listener:
        control = Control(listener, answer)
        control.start()
        try:
            yield folder
        finally:
            control.close()


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, OSError, SystemExit])
def test_an_error_is_an_answer_and_ends_nothing(tmp_path: pathlib.Path, error: type[BaseException]) -> None:
    """A new version that needs too much memory ended the thread; later callers waited for ten minutes."""

    def answer(request: ControlRequest) -> dict[str, Any]:
        if request.verb == "load":
            raise error("too much")
        return {"verb": request.verb}

    with controlled(tmp_path, answer) as folder:
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"{error.__name__}: too much"):
                ask(folder, ControlRequest("load"))
        assert ask(folder, ControlRequest("status")) == {"verb": "status"}


def test_a_slow_load_does_not_block_a_rollback(tmp_path: pathlib.Path) -> None:
    begun, ends = threading.Event(), threading.Event()
    answers: list[Any] = []

    def answer(request: ControlRequest) -> dict[str, Any]:
        if request.verb == "load":
            begun.set()
            assert ends.wait(PATIENCE)
        return {"verb": request.verb}

    with controlled(tmp_path, answer) as folder:
        loading = threading.Thread(target=lambda: answers.append(ask(folder, ControlRequest("load"))))
        loading.start()
        try:
            assert begun.wait(PATIENCE)
            assert ask(folder, ControlRequest("rollback")) == {"verb": "rollback"} and not answers
        finally:
            ends.set()
            loading.join(PATIENCE)
    assert answers == [{"verb": "load"}]
