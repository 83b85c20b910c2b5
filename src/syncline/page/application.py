"""The page as an ASGI application: access first, then the API and the files of the page.

Only reading is possible: GET and HEAD. A request must name this host as its Host (no DNS rebinding), must not come
from another site, and brings a cookie or a token; without one it gets a page that says how to get a link.
"""

from __future__ import annotations

import functools
import importlib.resources
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from syncline.errors import StoreError
from syncline.page.access import COOKIE_SECONDS, Access
from syncline.page.connections import LET_IN
from syncline.page.hosts import Hosts
from syncline.page.live import MOST_STREAMS, LiveJob, Streams
from syncline.page.openapi import description
from syncline.page.openmetrics import CONTENT_TYPE, exposition
from syncline.page.runs import RunNotFound, Runs

#: Scripts, styles and requests of our own only; nothing may frame the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
#: Metrics in one answer, and points of each.
MOST_CURVES, MOST_POINTS = 64, 2_000
MEDIA_TYPES = {"image": "image/png", "histogram": "application/json", "text": "text/plain; charset=utf-8"}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

FILES = {
    "/": ("static/index.html", "text/html; charset=utf-8"),
    "/style.css": ("static/style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("static/icon.svg", "image/svg+xml"),
    "/favicon.ico": ("static/icon.svg", "image/svg+xml"),  # asked for where no page names an icon
    "/uplot.css": ("_vendor/uplot/uPlot.min.css", "text/css; charset=utf-8"),
    "/uplot.js": ("_vendor/uplot/uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    **{
        f"/{name}.js": (f"static/{name}.js", "text/javascript; charset=utf-8")
        for name in ("app", "charts", "figures", "media", "members", "picture", "words")
    },
}


class Page:
    """The application of one job, or of the runs of a folder. `hosts`: what a request may name as its Host."""

    def __init__(self, access: Access, runs: Runs, hosts: Hosts, job: LiveJob | None = None) -> None:
        self._access, self._runs, self._hosts, self._job = access, runs, hosts, job
        self.streams = Streams(job) if job is not None else None
        routes = [
            Route("/open", self._open),
            Route("/metrics", self._metrics),
            Route("/api/v1/openapi.json", self._description),
            Route("/api/v1/runs", self._list),
            Route("/api/v1/runs/{run}", self._run),
            Route("/api/v1/runs/{run}/rows", self._rows),
            Route("/api/v1/runs/{run}/curves", self._curves),
            Route("/api/v1/runs/{run}/events", self._events),
            Route("/api/v1/runs/{run}/media", self._media),
            Route("/api/v1/runs/{run}/media/{id}", self._media_content),
            Route("/api/v1/stream", self._stream),
            *(Route(path, self._file) for path in FILES),
        ]
        handlers: dict[Any, Any] = {404: _not_found, 405: _not_allowed, StoreError: _unreadable, RunNotFound: _no_run}
        self._app = Starlette(routes=routes, exception_handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets, no lifespan
        request = Request(scope)

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                extra = {"cache-control": "no-store", **HEADERS}
                added = [(k.encode(), v.encode()) for k, v in extra.items() if k.encode() not in names]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        refusal = self._refusal(request)
        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not self._hosts.allows(request.headers.get("host", "")):
            return _error(
                421, "the page is not for this name; start the job with --page-host NAME to use another one"
            )
        if request.method not in ("GET", "HEAD"):
            return _error(405, "only GET and HEAD are possible")
        path = request.url.path
        if path == "/open":
            return None  # a link may be followed from anywhere; it needs its code
        if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return _error(403, "another site asks for this")
        origin = request.headers.get("origin")
        if origin is not None and not self._is_own(origin, request.headers["host"]):
            return _error(403, "another site asks for this")
        if self._is_allowed(request):
            request.scope.get(LET_IN, _nothing)()
            return None
        if path == "/":
            return HTMLResponse(_CLOSED, 401)
        return _error(401, "open the page by its link first: syncline page JOB prints one")

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether the page itself asks. Behind a proxy it may have another name than this request."""
        said = origin.partition("://")[2].lower()
        return said == host.lower() or (self._hosts.is_proxied and self._hosts.allows(said))

    def _is_allowed(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._access.allows_token(token.strip())
        jar: SimpleCookie = SimpleCookie()
        try:
            jar.load(request.headers.get("cookie", ""))
        except CookieError:
            return False
        cookie = jar.get(self._access.cookie_name)
        return cookie is not None and self._access.allows_cookie(cookie.value, time.time())

    # -- the page -----------------------------------------------------------------------------------------

    async def _open(self, request: Request) -> Response:
        """Redeems the code of a link. The page then loads itself: that request comes from this site.

        HEAD does not: what looks at a link before its reader does must not use it up.
        """
        if request.method == "HEAD":
            return HTMLResponse(_CLOSED, 401)
        cookie = self._access.redeem(request.query_params.get("code", ""), time.time())
        if cookie is None:
            return HTMLResponse(_CLOSED, 401)
        answer = HTMLResponse(_OPENED)
        answer.set_cookie(
            self._access.cookie_name,
            cookie,
            max_age=COOKIE_SECONDS,
            path="/",
            httponly=True,
            samesite="strict",
            secure=self._hosts.is_proxied and request.headers.get("x-forwarded-proto", "").lower() == "https",
        )
        return answer

    async def _file(self, request: Request) -> Response:
        content, kind = _content(request.url.path)
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    # -- the API ------------------------------------------------------------------------------------------

    async def _description(self, request: Request) -> Response:
        return _json(description())

    async def _list(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._runs.listed))

    async def _run(self, request: Request) -> Response:
        name = request.path_params["run"]
        look = self._job.latest if self._job is not None and name == self._runs.live else None
        return _json(await run_in_threadpool(self._runs.view, name, look))

    async def _rows(self, request: Request) -> Response:
        member, since = request.query_params.get("member", ""), _number(request, "since", 0.0)
        if since is None:
            return _error(400, "since: give a number, seconds since 1970")
        return _json(await run_in_threadpool(self._runs.rows, request.path_params["run"], member, since))

    async def _curves(self, request: Request) -> Response:
        names, most = request.query_params.getlist("name"), _number(request, "most", 1000.0)
        if len(names) > MOST_CURVES:
            return _error(400, f"name: at most {MOST_CURVES} at a time")
        if most is None or not 2 <= most <= MOST_POINTS:
            return _error(400, f"most: give a number from 2 to {MOST_POINTS}")
        return _json(await run_in_threadpool(self._runs.curves, request.path_params["run"], names, int(most)))

    async def _events(self, request: Request) -> Response:
        after = _number(request, "after", 0.0)
        if after is None:
            return _error(400, "after: give the number of an event")
        return _json(await run_in_threadpool(self._runs.events, request.path_params["run"], int(after)))

    async def _media(self, request: Request) -> Response:
        return _json(await run_in_threadpool(self._runs.media, request.path_params["run"]))

    async def _media_content(self, request: Request) -> Response:
        """What an id means never changes: browsers may keep it."""
        run, number = request.path_params["run"], request.path_params["id"]
        if not (number.isascii() and number.isdecimal() and len(number) < 16):
            return _error(400, "id: give a number")
        kind, content = await run_in_threadpool(self._runs.media_content, run, int(number))
        return Response(content, media_type=MEDIA_TYPES[kind], headers={"cache-control": "private, max-age=3600"})

    async def _stream(self, request: Request) -> Response:
        if self.streams is None:
            return _error(404, "no job runs here")
        if self.streams.num_streams >= MOST_STREAMS:
            return _error(503, f"{MOST_STREAMS} streams are open already")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self.streams.stream(), media_type="text/event-stream", headers=headers)

    async def _metrics(self, request: Request) -> Response:
        look = self._job.latest if self._job is not None else None
        return Response(await run_in_threadpool(exposition, look), headers={"content-type": CONTENT_TYPE})


def _nothing() -> None:
    """Where the server does not ask which connections are let in."""


@functools.cache
def _content(path: str) -> tuple[bytes, str]:
    name, kind = FILES[path]
    return importlib.resources.files("syncline.page").joinpath(name).read_bytes(), kind


def _number(request: Request, name: str, usual: float) -> float | None:
    """A number of the query, from 0 on; None if it is none."""
    text = request.query_params.get(name)
    if text is None:
        return usual
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e15 else None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(status: int, text: str) -> Response:
    return Response(msgspec.json.encode({"error": text}), status, media_type="application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    return _error(404, "there is nothing here; /api/v1/openapi.json describes the API")


async def _not_allowed(request: Request, error: Exception) -> Response:
    return _error(405, "only GET and HEAD are possible")


async def _no_run(request: Request, error: Exception) -> Response:
    return _error(404, str(error))


async def _unreadable(request: Request, error: Exception) -> Response:
    return _error(422, str(error))


_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Syncline</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
)
_OPENED = f'{_HEAD}<meta http-equiv="refresh" content="0; url=/"></head><body><p>Opening …</p></body></html>'
_CLOSED = (
    f"{_HEAD}</head><body><h1>This page needs its link</h1><p>The link works once, and not for long. "
    "This command prints a new one:</p><pre>syncline page JOB</pre></body></html>"
)
