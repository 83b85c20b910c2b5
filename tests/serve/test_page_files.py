"""The page that tries a model, the status that it shows, and the description of the API, over real HTTP."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from tests.serve.saved import MODEL, Caller, save

from syncline.serve import Server
from syncline.serve.page_files import FILES

LABELLED = MODEL + '\nlabels = ["none", "some", "all"]\n'


def started(folder: pathlib.Path, **settings: Any) -> Any:
    (folder / "labelled.py").write_text(LABELLED)
    for number in (1, 2):
        save(folder / "saves", number)
    own = {"port": 0, "refresh": 0.0, "runs": str(folder / "runs"), **settings}
    return Server(f"{folder / 'labelled.py'}:Net", folder / "saves", **own)


def test_the_page_loads_its_own_files_only(tmp_path: pathlib.Path) -> None:
    """Whatever a file names is on this server; its policy lets nothing else in, and no script lies in the page."""
    with started(tmp_path) as server, Caller(server.url) as call:
        named = {"/"}
        for path in FILES:
            status, headers, content = call("GET", path)
            assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            text = content.decode()
            named |= set(re.findall(r'(?:from |src=|href=)"(/[^"]*)"', text))
            assert not re.findall(r"https?://(?!www\.w3\.org/)", text), path
            assert "<script>" not in text and " style=" not in text
        assert named <= {*FILES, "/openapi.json", "/metrics"}
        assert set(FILES) <= named, "a file that nothing loads"
        assert call("POST", "/", b"x")[0] == 405 and call("GET", "/page/../server.py")[0] == 404


def test_the_page_needs_no_token_and_what_it_shows_does(tmp_path: pathlib.Path) -> None:
    with started(tmp_path, host="0.0.0.0") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        with Caller(url) as call:
            assert call("GET", "/")[0] == call("GET", "/page/app.js")[0] == 200
        for path in ("/status", "/openapi.json", "/metrics"):
            with Caller(url) as call:
                assert call.get(path)[0] == 401
        with Caller(url, server.token) as call:
            assert call.get("/openapi.json")[1]["security"] == [{"token": []}]
            assert call.get("/status")[0] == 200


def test_the_status_says_versions_latency_and_queue(tmp_path: pathlib.Path) -> None:
    with started(tmp_path) as server, Caller(server.url) as call:
        assert call.post("/predict", {"inputs": [[1, 1, 1, 1]] * 3})[0] == 200
        assert call.post("/predict", {"inputs": "x"})[0] == 400
        status, told = call.get("/status")
        assert status == 200 and 0 < told.pop("p50_seconds") <= told.pop("p99_seconds")
        assert told == {
            "name": "net", "current": "2", "canary": "", "share": 0.0, "is_pinned": False,
            "versions": [{"name": "2", "step": 20}], "labels": ["none", "some", "all"], "num_answered": 1,
            "num_refused": 1, "num_queued": 0, "num_connections": 1, "num_batches": 1, "num_rows": 3,
            "num_replicas": 1,
        }  # fmt: skip


def test_the_description_has_every_path_and_each_answers(tmp_path: pathlib.Path) -> None:
    with started(tmp_path) as server, Caller(server.url) as call:
        told = call.get("/openapi.json")[1]
        assert told["openapi"] == "3.1.0" and "security" not in told
        text = json.dumps(told)
        for name in re.findall(r"#/components/schemas/(\w+)", text):
            assert name in told["components"]["schemas"]
        for path, operations in told["paths"].items():
            real = path.replace("{version}", "2")
            for method in operations:
                status, headers, _ = call(method.upper(), real, b"{}" if method == "post" else None)
                assert str(status) in operations[method]["responses"], path
                kinds = operations[method]["responses"][str(status)]["content"]
                assert headers["content-type"].partition(";")[0] in kinds, path
