"""Proof that a pipeline trains a model for which one process has too little memory, and has each parameter once.

`RLIMIT_DATA` limits memory of a process's own. It does not count shared memory, where parameters and gradients of a
pipeline are, so both kinds are measured besides.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.launch.conftest import commands

__all__ = ["commands"]
pytestmark = pytest.mark.proof

LARGE = """
    import json, os, pathlib, resource, sys, torch, syncline
    from torch import nn
    from syncline.torch import DistributedOptimizer, Pipeline, deferred_init

    if limit := int(sys.argv[1]):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    job = syncline.init()
    torch.manual_seed(0)
    with deferred_init():  # 1 GiB of parameters
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.ReLU()) for _ in range(64)))
    pipe = Pipeline(model, nn.functional.mse_loss)
    opt = DistributedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.01), model=pipe)
    for _ in range(2):
        loss = pipe.step(torch.ones(8, 2048), torch.ones(8, 2048))
        opt.step(); opt.zero_grad()

    def resident(pid):  # bytes of its own, and its part of those that several processes have
        lines = [line.split() for line in open(f"/proc/{pid}/smaps_rollup")]
        found = {words[0]: int(words[1]) << 10 for words in lines if words[-1] == "kB"}
        return found["Pss_Anon:"], found["Pss_Shmem:"]

    stages = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    print("resident", json.dumps([resident(pid) for pid in (os.getpid(), *stages)]))
    data = next(line for line in open("/proc/self/status") if line.startswith("VmData:"))
    print(f"loss {loss:.6f}, data {int(data.split()[1]) << 10}, stages {[s.parameter_bytes for s in pipe.stats()]}")
"""


MODEL_BYTES = 1 << 30


def test_two_stages_train_what_one_process_has_no_memory_for(commands: Any) -> None:
    """With 60 % of the memory that one process takes, it fails and says what helps; two stages end at its loss. Of
    their own, both together have less than a model; what they share is a model and its gradients.
    """
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
    held = json.loads(re.search(r"stages (\[[^]]*\])", pipeline.output).group(1))  # type: ignore[union-attr]
    assert sum(held) == MODEL_BYTES and max(held) <= 0.6 * MODEL_BYTES, pipeline.output
    resident = json.loads(re.search(r"resident (\[\[.*\]\])", pipeline.output).group(1))  # type: ignore[union-attr]
    own, shared = zip(*resident, strict=True)
    print("resident, own and shared MiB:", [(a >> 20, b >> 20) for a, b in resident])
    # A process with the model, or with all gradients of its stage, besides what is shared would have more; so would
    # both together, if gradients were made elsewhere than where servers read them.
    assert len(resident) == 2 and max(own) < 0.7 * MODEL_BYTES, resident
    assert 1.8 * MODEL_BYTES < sum(shared) < 2.3 * MODEL_BYTES, resident
    print(f"one process takes {int(data) >> 20} MiB; with {limit >> 20} MiB for each, two stages train")
