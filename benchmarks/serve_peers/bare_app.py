"""A bare ASGI application under uvicorn that calls the module: bare_app.py MODEL PORT."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import uvicorn
from model import MODELS

MODEL = MODELS[sys.argv[1]]().eval()


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    with torch.inference_mode():
        output = MODEL(torch.tensor(json.loads(body)["input"]).unsqueeze(0)) if body else torch.zeros(1)
    content = json.dumps({"output": output[0].tolist()}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", access_log=False, lifespan="off")
