"""Runs the page: in a thread beside a coordinator, or in the foreground for runs that have ended.

The web framework is imported when the first browser comes, or when the job has run for a while. So a short job that
has no viewers pays nothing, and in a long one the first browser does not wait for imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from syncline.errors import ConfigError
from syncline.net import tcp
from syncline.page.access import Access
from syncline.page.hosts import hosts_of
from syncline.page.live import LiveJob
from syncline.page.runs import Runs

if TYPE_CHECKING:
    from syncline.page.application import Page

#: How often the thread looks whether it is to end, before the first browser.
_LOOK_SECONDS = 0.5
#: Without a browser the packages are imported after this time.
WARM_SECONDS = 20.0
#: For requests that are under way, at the end.
_END_SECONDS = 1.0
TOKEN_FILE = "page.token"


class PageServer:
    """Serves the page on a socket that listens already."""

    def __init__(
        self,
        sock: socket.socket,
        access: Access,
        folder: pathlib.Path,
        name: str,
        job: LiveJob | None,
        page_hosts: Sequence[str] = (),
    ) -> None:
        """`folder`: with one folder per run. `name`: of the run that goes on; "": none. `page_hosts`: --page-host."""
        self._sock, self.access, self._folder, self._name, self._job = sock, access, folder, name, job
        self._page_hosts = page_hosts
        self._closed = threading.Event()
        self._server: Any = None
        self._page: Page | None = None
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    @property
    def address(self) -> str:
        """As a browser needs it."""
        return address_of(self._sock)

    def new_link(self) -> str:
        """A link that opens the page once."""
        return link_of(self._sock, self.access.new_code(time.time()))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._server is not None:
            self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(2 * _END_SECONDS + _LOOK_SECONDS)
        self._sock.close()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._closed.is_set():
            if time.monotonic() - began > WARM_SECONDS:
                self.serve()
                return
            with contextlib.suppress(OSError, ValueError):
                if select.select([self._sock], [], [], _LOOK_SECONDS)[0]:
                    self.serve()
                    return

    def serve(self) -> None:
        """Serves until the end."""
        import uvicorn

        from syncline.page.application import Page
        from syncline.page.connections import BACKLOG, MOST_CONNECTIONS, BoundedProtocol

        runs = Runs(self._folder, self._name or None)
        page = self._page = Page(self.access, runs, hosts_of(self._sock, self._page_hosts), self._job)
        settings = uvicorn.Config(
            page,
            http=BoundedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            backlog=BACKLOG,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=1 << 14,
        )
        self._server = uvicorn.Server(settings)
        if not self._closed.is_set():
            asyncio.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._sock]))
        while not serving.done():
            if (self._closed.is_set() or self._server.should_exit) and self._page is not None:
                if self._page.streams is not None:
                    self._page.streams.close()
                self._server.should_exit = True
            await asyncio.wait([serving], timeout=_LOOK_SECONDS)


def listen(where: str, option: str = "--page", seconds: float = 0.0) -> socket.socket:
    """The socket of the page. `where`: auto, PORT, ADDRESS or ADDRESS:PORT; loopback unless it names an address.
    `option`: with which that can be said. `seconds`: for a page that ends to let go of the port.
    """
    host, port = "127.0.0.1", 0
    if where != "auto":
        said, _, number = where.rpartition(":")
        if where.isdecimal():
            said, number = "", where
        elif ":" not in where or where.endswith("]"):
            said, number = where, "0"
        if not (number.isdecimal() and int(number) <= 65_535):
            off = "off, " if option == "--page" else ""
            raise ConfigError(
                f"{option} {where!r}: give {off}PORT, ADDRESS or ADDRESS:PORT, e.g. 8080 or 0.0.0.0:8080"
            )
        host, port = said.strip("[]") or host, int(number)
    return tcp.bind(host, port, option, seconds)


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def new_code() -> str:
    return secrets.token_urlsafe(18)


def link_of(sock: socket.socket, code: str) -> str:
    return f"{address_of(sock)}/open?code={code}"
