"""LitServe with its dynamic batching: litserve_app.py MODEL PORT."""

from __future__ import annotations

import sys
from typing import Any

import litserve
import torch
from model import MODELS


class Api(litserve.LitAPI):
    def setup(self, device: Any) -> None:
        self.model = MODELS[sys.argv[1]]().eval()

    def decode_request(self, request):  # LitServe reads annotations as FastAPI does
        return torch.tensor(request["input"])

    def batch(self, inputs: Any) -> Any:
        return torch.stack(inputs)

    def predict(self, x: Any) -> Any:
        with torch.inference_mode():
            return self.model(x)

    def unbatch(self, output: Any) -> Any:
        return output.tolist()

    def encode_response(self, output: Any) -> Any:
        return {"output": output}


if __name__ == "__main__":
    server = litserve.LitServer(
        Api(max_batch_size=32, batch_timeout=0.005), accelerator="cpu", workers_per_device=1, timeout=60
    )
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="warning", access_log=False
    )
