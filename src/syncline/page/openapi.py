"""The API as an OpenAPI description, from the types of its answers."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from syncline.core.media import BinCounts
from syncline.page.runs import CurveSet, EventList, MediaList, RunList, RunView
from syncline.stats import JobLook
from syncline.store.series import Series


class Refusal(msgspec.Struct, frozen=True):
    """Why a request was refused."""

    error: str


_RUN = {
    "name": "run",
    "in": "path",
    "required": True,
    "description": "Name of a run, as in /api/v1/runs.",
    "schema": {"type": "string"},
}


def _query(name: str, kind: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": text, "schema": kind}


_SINCE = _query("since", {"type": "number", "minimum": 0, "maximum": 1e14}, "Rows from this time on, in seconds.")
_MEMBER = _query("member", {"type": "string"}, "Name of a member; without it, the job as a whole.")
_NAME = _query("name", {"type": "array", "items": {"type": "string"}, "maxItems": 64}, "Names of metrics.")
_MOST = _query("most", {"type": "integer", "minimum": 2, "maximum": 2000}, "Points of each; more are merged.")
_ID = {
    "name": "id",
    "in": "path",
    "required": True,
    "description": "Id of one of them, as in the list.",
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**14},
}
_AFTER = _query("after", {"type": "integer", "minimum": 0, "maximum": 10**14}, "Events after this number only.")


@functools.cache
def description() -> dict[str, Any]:
    types: list[Any] = [RunList, RunView, Series, CurveSet, EventList, MediaList, BinCounts, JobLook, Refusal]
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    runs, run, rows, curves, events, media, histogram, look, refused = found

    def get(text: str, schema: Any, *parameters: Any, kind: str = "application/json") -> dict[str, Any]:
        refusals = {
            code: {"description": what, "content": {"application/json": {"schema": refused}}}
            for code, what in (
                ("400", "A parameter is wrong."),
                ("401", "Neither a cookie nor a token."),
                ("403", "Another site asks."),
                ("404", "There is no such run."),
                ("405", "Only GET and HEAD are possible."),
                ("421", "Another host is named."),
                ("422", "The readings of the run cannot be read."),
                ("503", "Too many streams."),
            )
        }
        answer = {"description": text, "content": {kind: {"schema": schema}}}
        return {"get": {"summary": text, "parameters": list(parameters), "responses": {"200": answer, **refusals}}}

    whole: dict[str, Any] = {"type": "object"}
    events_kind = "text/event-stream"
    content = get("One of them: a histogram, an image or a text.", histogram, _RUN, _ID)
    content["get"]["responses"]["200"]["content"] |= {
        "image/png": {"schema": {}},
        "text/plain": {"schema": {"type": "string"}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Syncline", "version": "1", "description": "What a job does, and what runs did."},
        "paths": {
            "/api/v1/runs": get("The runs of the folder.", runs),
            "/api/v1/runs/{run}": get("One run and its last look.", run, _RUN),
            "/api/v1/runs/{run}/rows": get("Its figures over time.", rows, _RUN, _MEMBER, _SINCE),
            "/api/v1/runs/{run}/curves": get("Its metrics over steps.", curves, _RUN, _NAME, _MOST),
            "/api/v1/runs/{run}/events": get("What happened.", events, _RUN, _AFTER),
            "/api/v1/runs/{run}/media": get("Its images, histograms and texts.", media, _RUN),
            "/api/v1/runs/{run}/media/{id}": content,
            "/api/v1/stream": get("Each look as it comes: events `look` with JSON.", look, kind=events_kind),
            "/api/v1/openapi.json": get("This description.", whole),
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }
