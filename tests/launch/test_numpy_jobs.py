"""Scripts on `job.kv` alone, as processes: they train as one process does, and a killed worker comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.launch.counted import WAYS, check_a_kill

LOGISTIC = """
    params = job.kv.register({"w": np.zeros(4, np.float32)}, syncline.Rule("SGD", lr=0.3, momentum=0.5))

    def change_of(params, x, y):
        error = 1 / (1 + np.exp(-x @ params["w"])) - y
        return {"w": x.T @ error / np.float32(len(y))}

    def mean_loss(params):
        return float(np.log1p(np.exp(-(2 * y - 1) * (x @ params["w"]))).mean())
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sync", *(pytest.param(way, marks=pytest.mark.proof) for way in [*WAYS][1:])])
def test_the_loss_falls_as_in_one_process_and_a_killed_worker_comes_back(commands: Any, way: str) -> None:
    """Each sample counts once per epoch, also that of the push which was under way."""
    check_a_kill(commands, LOGISTIC, way)


EQUAL = """
    import sys
    import numpy as np
    import syncline

    job = syncline.init()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 5)).astype(np.float32), rng.integers(2, size=200).astype(np.float32)
    rules = {"sgd": syncline.Rule("SGD", lr=0.3, momentum=0.9), "adam": syncline.Rule("Adam", lr=0.05)}
    first = np.random.default_rng(1 + job.rank)  # the chief's values count
    params = job.kv.register({name: first.normal(size=5).astype(np.float32) for name in rules}, rules)
    for number in job.steps(20):
        mine = {1: [(0, 10)], 2: [(0, 3), (3, 10)]}[job.world_size][job.rank]  # unequal parts of a global batch
        some = slice(10 * number + mine[0], 10 * number + mine[1])
        errors = {name: 1 / (1 + np.exp(-x[some] @ w)) - y[some] for name, w in params.items()}
        gradients = {name: (x[some].T @ error / len(error)).astype(np.float32) for name, error in errors.items()}
        params = job.kv.push_pull(gradients, weight=mine[1] - mine[0]).wait()
    job.barrier("trained")
    if job.is_chief:
        np.savez(sys.argv[1], **job.kv.pull(rules))
    job.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("-s", "2"), pytest.param(("--exchange", "ring"), marks=pytest.mark.proof)],
    ids=["servers", "ring"],
)
def test_in_sync_parameters_equal_those_of_one_process_on_the_global_batch(
    commands: Any, options: tuple[str, ...]
) -> None:
    script = commands.script(EQUAL)
    alone = commands.finish(commands.start("alone.npz", program=(script,)))
    assert alone.code == 0, alone.output
    done = commands.run("run", "-w", "2", *options, script, "job.npz")
    assert done.code == 0, done.output
    with np.load(commands.folder / "alone.npz") as one, np.load(commands.folder / "job.npz") as two:
        assert sorted(one.files) == ["adam", "sgd"]
        for name in one.files:
            np.testing.assert_allclose(two[name], one[name], rtol=2e-5, atol=2e-6, err_msg=name)
