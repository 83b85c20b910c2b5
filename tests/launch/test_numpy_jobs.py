"""Scripts on `job.kv` alone, as processes: they train as one process does, and a killed worker comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

#: `seen` counts on the servers how often each sample was in a step that counts.
TRAIN = """
    import os, pathlib, signal, sys, time
    import numpy as np
    import syncline
    from syncline.data import ArraySource, batches

    victim, num_samples = sys.argv[1], 240
    job = syncline.init()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_samples, 4)).astype(np.float32)
    y = (x @ np.array([1, -2, 0.5, 1], np.float32) > 0).astype(np.float32)
    source = ArraySource((x, y, np.arange(num_samples)))
    params = job.kv.register({"w": np.zeros(4, np.float32)}, syncline.Rule("SGD", lr=0.3, momentum=0.5))
    job.kv.register({"seen": np.zeros(num_samples, np.float32)}, syncline.Rule("Add"), reduce="sum")

    def mean_loss(w):
        return float(np.log1p(np.exp(-(2 * y - 1) * (x @ w))).mean())

    is_first_life = job.life.number == 1
    if job.name == victim and not is_first_life:
        pathlib.Path("back").touch()
    for epoch in range(4):
        while epoch == 2 and victim and job.name != victim and not pathlib.Path("back").exists():
            time.sleep(0.02)
        for some, labels, numbers in batches(source, 8, shuffle=True):
            while epoch == 1 and victim and job.name != victim and not pathlib.Path("killed").exists():
                time.sleep(0.02)  # the victim gets a batch of this epoch
            error = 1 / (1 + np.exp(-some @ params["w"])) - labels
            ones = np.zeros(num_samples, np.float32)
            ones[numbers] = 1
            gradient = some.T @ error / np.float32(len(labels))
            pushed = job.kv.push_pull({"w": gradient, "seen": ones}, weight=1)
            if job.name == victim and is_first_life and epoch == 1:
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)  # the commit may be under way
            params = pushed.wait()
    job.barrier("end")
    params = job.kv.pull()
    counts = ",".join(sorted({f"{count:g}" for count in params["seen"].tolist()}))
    print(f"RESULT {job.name} {job.life.number} {mean_loss(params['w']):.4f} {counts}", flush=True)
    job.close()
"""


def results(output: str) -> list[list[str]]:
    return sorted(line.split("RESULT ")[1].split() for line in output.splitlines() if "RESULT " in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("-s", "2"),
        pytest.param(("-s", "1", "--policy", "bounded:2"), marks=pytest.mark.proof),
        pytest.param(("-s", "1", "--policy", "async"), marks=pytest.mark.proof),
        pytest.param(("--exchange", "ring"), marks=pytest.mark.proof),
    ],
    ids=["sync", "bounded", "async", "ring"],
)
def test_the_loss_falls_as_in_one_process_and_a_killed_worker_comes_back(
    commands: Any, options: tuple[str, ...]
) -> None:
    """Worker 1 is killed in its second epoch, right after it has sent a push. Each sample counts once per epoch."""
    script = commands.script(TRAIN)
    alone = commands.finish(commands.start("", program=(script,)))
    assert alone.code == 0, alone.output
    ((_, _, reached, counts),) = results(alone.output)
    assert float(reached) < 0.25 and counts == "4", alone.output
    done = commands.run("run", "-w", "2", *options, script, "worker-1")
    assert done.code == 0 and "worker-1 was killed by SIGKILL" in done.output, done.output
    found = results(done.output)
    assert [result[:2] for result in found] == [["worker-0", "1"], ["worker-1", "2"]], done.output
    for _, _, loss, counts in found:
        # In rounds there are half as many steps; otherwise the steps of both count in full.
        assert float(loss) < 0.35 and counts == "4", done.output
    assert found[0][2] == found[1][2], "the workers ended with different models"


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
