"""schemathesis asks the page's API whatever its description allows, and more: `make test-page`."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from tests.page.served import look, served

from syncline.core.media import Histogram, Image, MediaItem
from syncline.core.series import point
from syncline.store.series import SeriesWriter

pytestmark = pytest.mark.page


def test_the_api_keeps_to_its_description(tmp_path: pathlib.Path) -> None:
    """Each answer has the status, the type and the shape that the description says; nothing is a 500."""
    import schemathesis

    folder = tmp_path / "now"
    folder.mkdir()
    writer = SeriesWriter(folder / "series.db")
    writer.write(1.0, {"": {"step": 1}, "worker-0": {"cores": 1.0}}, [("loss", point(1, 1.0, 2.0))])
    items = [
        MediaItem("a", "image", 1, Image(np.zeros((2, 2))).content("a")),
        MediaItem("b", "histogram", 1, Histogram([1.0]).content("b")),
        MediaItem("c", "text", 1, b"text"),
    ]
    writer.write(2.0, {}, media=[(item, 1.0, "worker-0") for item in items])
    writer.close()
    (folder / "events.jsonl").write_text('{"number":1,"at":1.0,"step":0,"kind":"join","text":"x"}\n')
    num_asked = 0
    with served(tmp_path) as page:
        page.job.show(look(1))
        schema = schemathesis.openapi.from_dict(page.json("/api/v1/openapi.json"))
        schema.config.update(base_url=page.server.address) if hasattr(schema.config, "update") else None
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path == "/api/v1/stream":
                continue  # it has no end
            from hypothesis import HealthCheck, given, settings

            @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def ask(case: schemathesis.Case) -> None:
                nonlocal num_asked
                num_asked += 1
                case.call_and_validate(
                    base_url=page.server.address,
                    headers=page.token,
                    excluded_checks=[schemathesis.checks.CHECKS.get_one("ignored_auth")]
                    if hasattr(schemathesis.checks, "CHECKS")
                    else [],
                )

            ask()
    assert num_asked > 100
