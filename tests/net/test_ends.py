"""The end of a connection reaches whoever waits on it, whatever else goes wrong."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest

from syncline.core.wire.control import Leave
from syncline.net import memory
from syncline.net.rpc import Call, Endpoint, Stamp
from syncline.net.transport import Peer


def test_an_action_that_fails_keeps_nobody_else_from_hearing_that_the_connection_is_lost() -> None:
    left, right = memory.pair(Peer("worker", "worker-0", 0), Peer("server", "server-0", 0))
    ends: list[str] = []
    heard: list[str] = []
    silent = types.SimpleNamespace(handle=lambda request: None, lost=lambda endpoint, reason: None)
    Endpoint(right, Stamp("job"), silent)  # type: ignore[arg-type]
    service = types.SimpleNamespace(lost=lambda endpoint, reason: ends.append(reason))
    asking = Endpoint(left, Stamp("job"), service)  # type: ignore[arg-type]

    def finish(name: str) -> Callable[[Call], None]:
        def end(call: Call) -> None:
            heard.append(name)
            if name == "first":
                raise RuntimeError("can't start new thread")

        return end

    for name in ("first", "second"):
        asking.call(Leave(), then=finish(name))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        asking.lost("it died")
    assert heard == ["first", "second"] and ends == ["it died"]
    asking.close()
