"""Proof that a pipeline trains a model for which one process has too little memory."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.launch.conftest import commands

__all__ = ["commands"]
pytestmark = pytest.mark.proof

LARGE = """
    import resource, sys, torch, syncline
    from torch import nn
    from syncline.torch import DistributedOptimizer, Pipeline, deferred_init

    if limit := int(sys.argv[1]):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    job = syncline.init()
    torch.manual_seed(0)
    with deferred_init():  # 1 GiB of parameters
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.ReLU()) for _ in range(64)))
    # In the middle: a cut by the time of layers may differ, on a busy machine by much.
    pipe = Pipeline(model, nn.functional.mse_loss, example=(torch.zeros(8, 2048),), cut_before=["32"])
    opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.01), model=pipe)
    for _ in range(2):
        loss = pipe.step(torch.ones(8, 2048), torch.ones(8, 2048))
        opt.step(); opt.zero_grad()
    data = next(line for line in open("/proc/self/status") if line.startswith("VmData:"))
    print(f"loss {loss:.6f}, data {int(data.split()[1]) << 10}, stages {[s.parameter_bytes for s in pipe.stats()]}")
"""


def test_two_stages_train_what_one_process_has_no_memory_for(commands: Any) -> None:
    """With 60 % of the memory that one process takes, it fails and says what helps; two stages end at its loss."""
    script = commands.script(LARGE)

    def train(*options: str, limit: int) -> Any:
        servers = (
            "-s",
            "2",
            "--replicas",
            "2",
        )  # else a worker keeps a copy for a server that dies
        return commands.run("run", *servers, "--max-restarts", "0", *options, script, str(limit))

    whole = train("-w", "1", limit=0)
    assert whole.code == 0, whole.output
    loss, data = re.search(r"loss ([0-9.]+), data (\d+)", whole.output).groups()  # type: ignore[union-attr]
    limit = int(data) * 6 // 10
    alone = train("-w", "1", limit=limit)
    assert alone.code == 1
    assert "this process has no memory left. The model has 1.0 GiB of parameters" in alone.output, alone.output
    assert "use more --stages" in alone.output
    pipeline = train("-w", "2", "--stages", "2", limit=limit)
    assert pipeline.code == 0, pipeline.output
    assert f"loss {loss}, " in pipeline.output, pipeline.output
    assert f"stages {[1 << 29] * 2}" in pipeline.output, pipeline.output
    print(f"one process takes {int(data) >> 20} MiB; with {limit >> 20} MiB for each, two stages train")
