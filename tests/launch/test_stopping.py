"""Jobs of real processes that end by a rule: exact steps, and the coordinator's last words."""

from __future__ import annotations

import re
from typing import Any

import pytest

SCRIPT = """
    import numpy as np
    import syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(1000, np.float32)}, syncline.Rule("SGD", lr=1.0))
    while not job.should_stop and job.own_step < 5000:
        job.kv.push({"x": np.ones(1000, np.float32)}).wait()
        job.report(score=job.own_step)
    job.barrier("over")
    print("END", job.step, float(job.kv.pull()["x"][0]))
"""


@pytest.mark.proof
def test_max_steps(commands: Any) -> None:
    result = commands.run(
        "run", "-w", "2", "-s", "2", "--max-steps", "9", "--stop", "scor>1e9", commands.script(SCRIPT)
    )
    assert result.code == 0, result.output
    assert result.output.count("END 9 -9.0") == 2
    assert result.output.count("stopped by   --max-steps 9: step 9") == 1, result.output
    assert "  metrics      score" in result.output and "last readings" not in result.output
    assert "--stop: no worker has reported 'scor'; reported are: score; did you mean 'score'?" in result.output


NEVER_ASKS = """
    import sys, torch, syncline
    from syncline.torch import DistributedOptimizer
    settings = dict(max_steps=int(sys.argv[1]), checkpoint="saves") if len(sys.argv) > 1 else {}
    torch.manual_seed(3)
    job = syncline.init(**settings)
    model = torch.nn.Linear(600, 400)  # large enough for gradients to leave while backward runs
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model=model)
    job.validate(lambda batch: {"loss": model(batch).pow(2).mean()}, torch.ones(8, 600), every=1000)
    job.put_back()
    try:
        while True:
            try:
                model(torch.randn(2, 600)).pow(2).mean().backward()
                opt.step()
                opt.zero_grad()
            except Exception:
                pass
    except syncline.Stopped as stopped:
        print("STOPPED", stopped, job.own_step, float(model.weight.detach().double().sum()), flush=True)
        raise
    print("RAN ON")
"""


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--policy", "async"], marks=pytest.mark.proof),
        pytest.param(["--exchange", "ring"], marks=pytest.mark.proof),
    ],
    ids=" ".join,
)
def test_a_script_that_never_asks_ends_well(commands: Any, options: list[str]) -> None:
    """It ran on without a word, and its model stood still. The last validation and the last save are made."""
    result = commands.run(
        "run", "-w", "2", *options, "--max-steps", "4", "--checkpoint", "saves", commands.script(NEVER_ASKS)
    )
    assert result.code == 0 and "RAN ON" not in result.output, result.output
    assert result.output.count("STOPPED --max-steps 4: step ") == 2, result.output
    fired = result.output.index("training stops by --max-steps 4: step ")
    assert fired < result.output.index("validation at step ") < result.output.index("stopped by   --max-steps 4")
    assert re.search(r"checkpoints +1 saved", result.output), result.output


def test_embedded_it_ends_well_and_goes_on_from_there(commands: Any) -> None:
    """`Stopped` comes in the middle of a step that has drawn from the random states: what is saved is from before."""
    script = commands.script(NEVER_ASKS)
    ends = []
    for steps in ("3", "6"):
        done = commands.finish(commands.start(script, steps, program=()))
        assert done.code == 0 and "RAN ON" not in done.output, done.output
        assert done.output.count("training stops by --max-steps") == 1
        ends += [line for line in done.output.splitlines() if line.startswith("STOPPED")]
    (commands.folder / "saves").rename(commands.folder / "others")
    whole = commands.finish(commands.start(script, "6", program=()))
    ends += [line for line in whole.output.splitlines() if line.startswith("STOPPED")]
    assert [line.rpartition(" ")[0] for line in ends] == [
        "STOPPED --max-steps 3: step 3 3",
        "STOPPED --max-steps 6: step 6 3",
        "STOPPED --max-steps 6: step 6 6",
    ]
    assert ends[1].split()[-1] == ends[2].split()[-1]
