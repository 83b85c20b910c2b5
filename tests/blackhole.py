"""An address of this host that never answers: a listener whose backlog is full drops what else comes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def blackhole() -> Iterator[tuple[str, int]]:
    """Host and port at which a connection is neither made nor refused."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        while True:
            filling = stack.enter_context(socket.socket())
            filling.settimeout(0.2)
            try:
                filling.connect(listening.getsockname())
            except TimeoutError:
                break
        yield listening.getsockname()
