"""Ray Serve with its dynamic batching: ray_app.py MODEL PORT."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import ray
import torch
from model import MODELS
from ray import serve


@serve.deployment(max_ongoing_requests=256)
class Net:
    def __init__(self, name: str, threads: int) -> None:
        torch.set_num_threads(threads)  # Ray gives a replica one
        self.model = MODELS[name]().eval()

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def answer(self, rows: list[Any]) -> list[Any]:
        with torch.inference_mode():
            return list(self.model(torch.stack(rows)).tolist())

    async def __call__(self, request: Any) -> Any:
        body = await request.json()
        return {"output": await self.answer(torch.tensor(body["input"]))}


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": here}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    serve.run(Net.bind(sys.argv[1], torch.get_num_threads()))
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    serve.shutdown()
    ray.shutdown()
