"""The model of `syncline serve` on Ray Serve, which adds and removes replicas by load:

serve run serve_on_ray:app model=model.py:Net weights=runs/mnist/checkpoints     (in this folder, with absolute paths)
"""

import numpy as np
from ray import serve

from syncline.serve import load_model


@serve.deployment(
    max_ongoing_requests=64,
    autoscaling_config={"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 16, "upscale_delay_s": 5},
)
class Model:
    def __init__(self, model: str, weights: str) -> None:
        self.model = load_model(model, weights)

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def answer(self, rows):
        outputs = self.model({"input": np.stack(rows)})
        return [{name: array[index].tolist() for name, array in outputs.items()} for index in range(len(rows))]

    async def __call__(self, request):
        return await self.answer(np.asarray((await request.json())["input"], np.float32))


def app(args: dict[str, str]) -> serve.Application:
    return Model.bind(args["model"], args["weights"])
