"""The end of a connection reaches whoever waits on it, whatever else goes wrong."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from syncline.net.rpc import Endpoint
from syncline.net.transport import Peer


def test_an_action_that_fails_keeps_nobody_else_from_hearing_that_the_connection_is_lost() -> None:
    asking, ends = Endpoint.__new__(Endpoint), []
    asking._lock, asking.peer = threading.Lock(), Peer("server", "server-0", 7)
    asking._service = types.SimpleNamespace(lost=lambda endpoint, reason: ends.append(reason))
    heard: list[str] = []

    def finish(name: str) -> Callable[..., None]:
        def end(*given: Any) -> None:
            heard.append(name)
            if name == "first":
                raise RuntimeError("can't start new thread")

        return end

    asking._calls = {k: types.SimpleNamespace(finish=finish(name)) for k, name in enumerate(["first", "second"])}
    with pytest.raises(RuntimeError, match="can't start new thread"):
        asking.lost("it died")
    assert heard == ["first", "second"] and ends == ["it died"]
