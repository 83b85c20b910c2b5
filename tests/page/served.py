"""A page on a real socket of loopback, with looks that the test makes."""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.patience import PATIENCE

from syncline.page import serving
from syncline.page.access import Access
from syncline.stats import Event, JobFigures, JobLook, JobVerdict, MemberCounts, MemberFigures, Wait


def look(number: int, **figures: Any) -> JobLook:
    members = (
        MemberFigures(name="server-0", role="server", num_rounds=3, apply=0.001, parameter_bytes=100),
        MemberFigures(
            name="worker-0",
            role="worker",
            step=number,
            num_steps=3,
            compute=0.1,
            wait=0.01,
            pid=7,
            counts=MemberCounts(10 * number, 20 * number, 0.5 * number, 30 * number),
        ),
    )
    known: dict[str, Any] = {"members": members, "staleness_counts": (5, 2, 1), "readings": {"loss": 0.5}, **figures}
    return JobLook(
        number=number,
        figures=JobFigures(at=1e9 + number, step=number, seconds=float(number), **known),
        verdicts=(JobVerdict(kind="straggler", subject="worker-0", text="worker-0 is slow"),),
        events=(Event(number=number, at=1e9, step=1, kind="note", text="<b>x</b>"),),
        readings=(("loss", number, 1e9 + number, 0.5),),
    )


WAIT = Wait("", 3, ["worker-0"], 2.0, "round")


class PlayedJob:
    """A job that is looked at when the test says so."""

    def __init__(self) -> None:
        self.latest: JobLook | None = None
        self.watchers: list[Callable[[JobLook], None]] = []

    def watch(self, watcher: Callable[[JobLook], None]) -> Callable[[], None]:
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)

    def show(self, found: JobLook) -> None:
        self.latest = found
        for watcher in list(self.watchers):
            watcher(found)


class Served:
    """The page and a client of it."""

    def __init__(self, server: serving.PageServer, job: PlayedJob) -> None:
        self.server, self.job = server, job
        self.host, _, port = server.address.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self.token = {"Authorization": f"Bearer {server.access.token}"}

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE)

    def get(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, dict[str, str], bytes]:
        """`headers`: with the token where nothing is said."""
        connection = self.connection()
        try:
            connection.request(method, path, headers=self.token if headers is None else headers)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, _, body = self.get(path)
        assert status == 200, body
        return json.loads(body)


@contextlib.contextmanager
def served(folder: pathlib.Path, name: str = "now", page_hosts: Sequence[str] = ()) -> Iterator[Served]:
    job = PlayedJob()
    server = serving.PageServer(serving.listen("auto"), Access("job", bytes(32)), folder, name, job, page_hosts)
    server.start()
    try:
        yield Served(server, job)
    finally:
        server.close()
