"""The serving API of one model as an OpenAPI description."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from syncline.serve.datatypes import ANY, DATATYPES, TensorSpec

_ERROR = {"$ref": "#/components/schemas/Error"}
#: What may happen to a request of any kind, and to one with a body.
_ANY = {
    "401": "The token is missing or wrong.",
    "403": "A page of another site asks, and no token is needed.",
    "405": "The path does not take this method.",
    "421": "The Host is that of another host, and no token is needed.",
    "429": "Too many requests of this address.",
    "500": "The server or the model failed.",
}
_WITH_BODY = {
    "400": "The request is not one that the model takes.",
    "404": "There is no such model or version.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "503": "Too many requests wait, or the server ends.",
}


def description(name: str, inputs: Sequence[TensorSpec], release: str, *, needs_token: bool) -> dict[str, Any]:
    """OpenAPI 3.1. The requests are those that this model takes."""
    infer = _post(
        "Calls the model, by the Open Inference Protocol.",
        {
            "application/json": {"schema": {"$ref": "#/components/schemas/InferRequest"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
        {
            "application/json": {"schema": {"$ref": "#/components/schemas/InferResponse"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
        (_HEADER_LENGTH,),
    )
    ready = _get("Whether it answers requests.", _flags("ready"), {"503": "Not now."}, error="ready")
    metadata = _get("Inputs and outputs of the model.", _ref("Model"))
    of_version = {"404": "There is no such version."}
    paths: dict[str, Any] = {
        "/v2": {"get": _get("The server and its extensions.", _ref("Server"))},
        "/v2/health/live": {"get": _open(_get("Whether the process runs.", _flags("live")))},
        "/v2/health/ready": {"get": _open(ready)},
        f"/v2/models/{name}": {"get": metadata},
        f"/v2/models/{name}/ready": {"get": ready},
        f"/v2/models/{name}/infer": {"post": infer},
        f"/v2/models/{name}/versions/{{version}}": {
            "get": _get("The same of one version.", _ref("Model"), of_version, (_VERSION,))
        },
        f"/v2/models/{name}/versions/{{version}}/ready": {
            "get": _get(
                "Whether it answers with this version.",
                _flags("ready"),
                {**of_version, "503": "Not now."},
                (_VERSION,),
                error="ready",
            )
        },
        f"/v2/models/{name}/versions/{{version}}/infer": {"post": _with_parameter(infer, _VERSION)},
        "/predict": {
            "post": _post(
                "Calls the model with plain JSON: one row, or several.",
                {"application/json": {"schema": {"$ref": "#/components/schemas/PlainRequest"}}},
                {"application/json": {"schema": {"$ref": "#/components/schemas/PlainResponse"}}},
            )
        },
        "/status": {"get": _get("Versions, latency and queue.", _ref("Status"))},
        "/metrics": {"get": _get("Counters and histograms.", {"type": "string"}, kind=METRICS)},
        "/openapi.json": {"get": _get("This description.", {"type": "object"})},
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": f"{name}, served by Syncline",
            "version": release,
            "description": "The Open Inference Protocol, and plain JSON on /predict.",
        },
        "paths": paths,
        "components": {"schemas": _schemas(inputs)},
    }
    if needs_token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


METRICS = "application/openmetrics-text"
_VERSION = {
    "name": "version",
    "in": "path",
    "required": True,
    "description": "The name of a version in memory; /status has them.",
    "schema": {"type": "string", "minLength": 1},
}
_HEADER_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "With binary data: the length of the JSON in front of it.",
    "schema": {"type": "integer", "minimum": 0},
}


def _schemas(inputs: Sequence[TensorSpec]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for spec in inputs:
        lengths = () if spec.shape is None else spec.shape[1:]
        nested = _nested(spec, lengths)
        rows[spec.name] = {"type": "array", "minItems": 1, "items": nested}
        row[spec.name] = (
            {"anyOf": [nested, _flat(spec, lengths)]} if len(lengths) > 1 and ANY not in lengths else nested
        )
    tensors = [_tensor(spec) for spec in inputs]
    output = _object(
        {
            "name": {"type": "string"},
            "datatype": {"enum": sorted(DATATYPES)},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "data": {"type": "array"},
            "parameters": {"type": "object"},
        },
        ("name", "datatype", "shape"),
    )
    parameters = {"type": "object", "properties": {"binary_data_output": {"type": "boolean"}}}
    wanted = _object({"name": {"type": "string"}, "parameters": {"type": "object"}}, ("name",))
    text = {"type": "string"}
    return {
        "Error": _object({"error": text}, ("error",)),
        "Server": _object(
            {"name": text, "version": text, "extensions": {"type": "array", "items": text}},
            ("name", "version", "extensions"),
        ),
        "Model": _object(
            {
                "name": text,
                "versions": {"type": "array", "items": text},
                "platform": text,
                "inputs": {"type": "array", "items": _ref("Tensor")},
                "outputs": {"type": "array", "items": _ref("Tensor")},
            },
            ("name", "versions", "platform", "inputs", "outputs"),
        ),
        "Tensor": _object(
            {
                "name": text,
                "datatype": {"enum": sorted(DATATYPES)},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": ANY}},
            },
            ("name", "datatype", "shape"),
        ),
        "InferRequest": _object(
            {
                "id": text,
                "parameters": parameters,
                "inputs": {
                    "type": "array",
                    "items": tensors[0] if len(tensors) == 1 else {"anyOf": tensors},
                    "minItems": len(tensors),
                    "maxItems": len(tensors),
                },
                "outputs": {"type": "array", "items": wanted},
            },
            ("inputs",),
        ),
        "InferResponse": _object(
            {
                "id": text,
                "model_name": text,
                "model_version": text,
                "outputs": {"type": "array", "minItems": 1, "items": output},
            },
            ("model_name", "model_version", "outputs"),
        ),
        "PlainRequest": {
            "oneOf": [
                {
                    **_object({key: _plain(by_name), "version": {"type": "string"}}, (key,)),
                    "additionalProperties": False,
                }
                for key, by_name in (("input", row), ("inputs", rows))
            ]
        },
        "PlainResponse": _object(
            {"output": {}, "outputs": {}, "model_name": text, "model_version": text}, ("model_name", "model_version")
        ),
        "Status": _object(
            {
                "name": text,
                "current": text,
                "canary": text,
                "share": {"type": "number", "minimum": 0, "maximum": 1},
                "is_pinned": {"type": "boolean"},
                "versions": {
                    "type": "array",
                    "items": _object({"name": text, "step": {"type": "integer"}}, ("name", "step")),
                },
                "labels": {"type": "array", "items": text},
                "num_answered": {"type": "integer"},
                "num_refused": {"type": "integer"},
                "num_queued": {"type": "integer"},
                "num_connections": {"type": "integer"},
                "num_batches": {"type": "integer"},
                "num_rows": {"type": "integer"},
                "num_replicas": {"type": "integer"},
                "p50_seconds": {"type": "number"},
                "p99_seconds": {"type": "number"},
            },
            (
                "name", "current", "canary", "share", "is_pinned", "versions", "labels", "num_answered",
                "num_refused", "num_queued", "num_connections", "num_batches", "num_rows", "num_replicas",
                "p50_seconds", "p99_seconds",
            ),
        ),
    }  # fmt: skip


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    lengths = [
        {"const": length} if length != ANY else {"type": "integer", "minimum": 1} for length in spec.shape or ()
    ]
    shape: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}
    if spec.shape is not None:
        shape = {"type": "array", "prefixItems": lengths, "minItems": len(lengths), "maxItems": len(lengths)}
    parameters = _object({"binary_data_size": {"type": "integer", "minimum": 0}}, ())
    return _object(
        {
            "name": {"const": spec.name},
            "datatype": {"const": spec.datatype},
            "shape": shape,
            "data": {"type": "array", "description": "Flat, or nested as the shape says."},
            "parameters": parameters,
        },
        ("name", "datatype", "shape"),
    )


def _nested(spec: TensorSpec, lengths: Sequence[int]) -> dict[str, Any]:
    """Numbers in lists that are nested as the shape of one row says."""
    found = _number(spec.datatype)
    if spec.shape is None:
        return {"anyOf": [found, {"type": "array", "minItems": 1, "items": {}}]}
    for length in reversed(lengths):
        bounds = {"minItems": 1} if length == ANY else {"minItems": length, "maxItems": length}
        found = {"type": "array", "items": found, **bounds}
    return found


def _flat(spec: TensorSpec, lengths: Sequence[int]) -> dict[str, Any]:
    """The numbers of one row in one list."""
    num_items = math.prod(lengths)
    return {"type": "array", "items": _number(spec.datatype), "minItems": num_items, "maxItems": num_items}


def _number(datatype: str) -> dict[str, Any]:
    kind = DATATYPES[datatype]
    if kind.kind == "b":
        return {"type": "boolean"}
    if kind.kind == "f":
        most = float(np.finfo(kind).max)
        return {"type": "number", "minimum": -most, "maximum": most}
    bits = 8 * kind.itemsize
    least, most = (0, (1 << bits) - 1) if kind.kind == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return {"type": "integer", "minimum": least, "maximum": most}


def _plain(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Of one input its data alone, or of any number an object with each by its name."""
    named = {**_object(dict(by_name), tuple(by_name)), "additionalProperties": False}
    return {"anyOf": [next(iter(by_name.values())), named]} if len(by_name) == 1 else named


def _object(properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _flags(name: str) -> dict[str, Any]:
    return _object({name: {"type": "boolean"}}, (name,))


def _refusals(codes: Mapping[str, str]) -> dict[str, Any]:
    return {
        code: {"description": what, "content": {"application/json": {"schema": _ERROR}}}
        for code, what in codes.items()
    }


def _get(
    text: str,
    schema: dict[str, Any],
    more: Mapping[str, str] | None = None,
    parameters: Sequence[dict[str, Any]] = (),
    *,
    kind: str = "application/json",
    error: str = "",
) -> dict[str, Any]:
    """`error`: 503 answers with this flag, which is false then, in place of an error object."""
    responses: dict[str, Any] = {
        "200": {"description": text, "content": {kind: {"schema": schema}}},
        **_refusals(_ANY),
    }
    responses.update(_refusals(more or {}))
    if error:
        responses["503"]["content"]["application/json"]["schema"] = _flags(error)
    return {"summary": text, "parameters": list(parameters), "responses": responses}


def _post(
    text: str, bodies: dict[str, Any], answers: dict[str, Any], parameters: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {
        "summary": text,
        "parameters": list(parameters),
        "requestBody": {"required": True, "content": bodies},
        "responses": {
            "200": {"description": "The outputs.", "content": answers},
            **_refusals({**_ANY, **_WITH_BODY}),
        },
    }


def _with_parameter(operation: dict[str, Any], parameter: dict[str, Any]) -> dict[str, Any]:
    return {**operation, "parameters": [parameter, *operation["parameters"]]}


def _open(operation: dict[str, Any]) -> dict[str, Any]:
    """Needs no token."""
    return {**operation, "security": []}
