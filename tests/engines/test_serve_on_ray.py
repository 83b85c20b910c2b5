"""examples/serve_on_ray.py on a real Ray Serve: answers, and replicas that are added under load."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import textwrap

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.serve.saved import arrays, save

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
RAY_BIN = os.environ.get("SYNCLINE_TEST_RAY", "")
pytestmark = [pytest.mark.engines, pytest.mark.skipif(not RAY_BIN, reason="no Ray; see make test-engines")]
MODEL = """
    import time

    class Linear:
        def load(self, weights):
            self.weight, self.bias = weights["weight"], weights["bias"]

        def __call__(self, x):
            time.sleep(0.3)
            return x @ self.weight.T + self.bias
"""
DEPLOYS = """
    import json, sys, threading, time, urllib.request
    import ray
    from ray import serve
    from serve_on_ray import app

    for attempt in range(10):  # Ray gives its own processes 30 s to start, whatever else the machine does
        try:
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
            break
        except Exception:
            ray.shutdown()
            if attempt == 9:
                raise
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[3])})
    serve.run(app({"model": sys.argv[1], "weights": sys.argv[2]}))

    def ask(row):
        with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[3]}/", json.dumps({"input": row}).encode()) as reply:
            return json.load(reply)["output"]

    def num_replicas():
        (found,) = (one.deployments["Model"] for one in serve.status().applications.values())
        return found.replica_states.get("RUNNING", 0)

    told = {"answers": [ask([1.0, 2.0, 3.0, 4.0]), ask([0.0, 0.0, 0.0, 1.0])], "before": num_replicas()}
    until, ends = time.monotonic() + float(sys.argv[4]), threading.Event()

    def load():
        while not ends.is_set():
            ask([1.0] * 4)

    for _ in range(60):
        threading.Thread(target=load, daemon=True).start()
    while num_replicas() < 2 and time.monotonic() < until:
        time.sleep(0.5)
    told["after"] = num_replicas()
    ends.set()
    print("TOLD " + json.dumps(told), flush=True)
    serve.shutdown()
    ray.shutdown()
"""


def test_the_example_answers_and_scales(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "deploys.py").write_text(textwrap.dedent(DEPLOYS))
    save(tmp_path / "saves", 3)
    words = [f"{tmp_path / 'model.py'}:Linear", str(tmp_path / "saves"), "18431", str(PATIENCE)]
    done = subprocess.run(
        [f"{RAY_BIN}/python", str(tmp_path / "deploys.py"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        timeout=4 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.partition("TOLD ")[2].splitlines()[0])
    weights = arrays(3)
    for row, answer in zip(([1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 1.0]), told["answers"], strict=True):
        assert np.allclose(answer, weights["weight"] @ np.array(row) + weights["bias"], atol=1e-5)
    assert told["before"] == 1 and told["after"] > 1
