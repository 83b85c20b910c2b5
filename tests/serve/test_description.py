"""schemathesis asks a served model whatever its description allows, and more; `make test-serve`."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from tests.serve.saved import MODEL, Caller, save

from syncline.serve import Server

pytestmark = pytest.mark.clients

#: Finite for all numbers that fit into FP32.
BOUNDED = MODEL.replace(
    "        super().__init__(4, 3)\n",
    "        super().__init__(4, 3)\n\n    def forward(self, input):\n"
    "        return super().forward(input.clamp(-1e6, 1e6))\n",
)
TWO = """
class Net:
    def load(self, weights): self.bias = weights["bias"]
    def __call__(self, small, flags): return small.sum(1, keepdims=True) + self.bias, flags
"""
#: The description cannot say that data has as many numbers as its shape, nor which versions are in memory.
LOOSE = "positive_data_acceptance"


def asking(url: str, loose: list[Any], answers: dict[int, int]) -> Callable[[Any], None]:
    """Asks one case, without the checks that are loose."""

    def ask(case: Any) -> None:
        response = case.call_and_validate(base_url=url, excluded_checks=loose)
        answers[response.status_code] = answers.get(response.status_code, 0) + 1
        assert response.status_code < 500
        if response.status_code >= 400:
            told = json.loads(response.content)
            assert set(told) == {"error"} and len(told["error"]) > 10, told

    return ask


@pytest.mark.parametrize(("source", "inputs"), [(BOUNDED, ()), (TWO, ("small:INT8:2", "flags:BOOL:2,1"))])
def test_the_api_keeps_to_its_description(tmp_path: pathlib.Path, source: str, inputs: tuple[str, ...]) -> None:
    """Each answer has the status, type and shape that the description says, each refusal is the protocol's error
    object with a sentence, and no input is a fault of the server. Plain requests that fit are answered.
    """
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from hypothesis.errors import Unsatisfiable

    (tmp_path / "model.py").write_text(source)
    save(tmp_path / "saves", 3)
    own: dict[str, Any] = {"port": 0, "refresh": 0.0, "runs": str(tmp_path / "runs"), "inputs": inputs}
    answers: dict[int, int] = {}
    with Server(f"{tmp_path / 'model.py'}:Net", tmp_path / "saves", **own) as server, Caller(server.url) as call:
        schema = schemathesis.openapi.from_dict(call.get("/openapi.json")[1])
        for found in schema.get_all_operations():
            operation = found.ok()
            is_exact = operation.path == "/predict" and not inputs  # several must have equally many rows
            loose = [] if is_exact else [schemathesis.checks.CHECKS.get_one(LOOSE)]

            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                cases = operation.as_strategy(generation_mode=mode)
                limit = settings(
                    max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
                )
                # An operation without parameters has no negative cases.
                is_negative = mode is schemathesis.GenerationMode.NEGATIVE
                with contextlib.suppress(Unsatisfiable) if is_negative else contextlib.nullcontext():
                    limit(given(case=cases)(asking(server.url, loose, answers)))()
        with Caller(server.url) as late:  # the first connection may have been idle for too long
            assert late.get("/v2/health/ready")[0] == 200
    print(f"\nanswers by status: {dict(sorted(answers.items()))}")
    assert answers[200] > 10 and answers[400] > 20 and answers[404] > 10
