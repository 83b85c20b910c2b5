"""One job of workers with several frameworks, and the examples that need no framework of ours."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np
import pytest
from tests.launch.counted import WAYS, check_a_kill

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


@pytest.fixture
def loads_apart(commands: Any) -> Any:
    """Each member imports what it needs; otherwise they are forked from a process that has loaded torch."""
    toml = commands.folder / "syncline.toml"
    toml.write_text(toml.read_text() + "preload = false\n")
    return commands


@pytest.mark.parametrize("options", [("-s", "2"), ("--exchange", "ring")])
def test_a_torch_a_jax_and_a_numpy_worker_equal_three_of_one_kind(loads_apart: Any, options: tuple[str, ...]) -> None:
    """In `sync`; and neither the JAX nor the NumPy worker loads torch."""
    found: dict[str, dict[str, Any]] = {}
    script = str(EXAMPLES / "mixed_logistic.py")
    for name, more in {"mixed": (), "numpy": ("--framework", "numpy")}.items():
        out = loads_apart.folder / f"{name}.npz"
        words = ["run", "-w", "3", *options, script, "--steps", "40", "--out", str(out), *more]
        done = loads_apart.run(*words, is_forked=False)
        assert done.code == 0, done.output
        with np.load(out) as arrays:
            found[name] = dict(arrays)
        if name == "mixed":
            told = dict(re.findall(r"with (\w+), (\[.*?\]) loaded", done.output))
            assert (told["numpy"], told["jax"]) == ("[]", "['jax']"), done.output
            accuracies = re.findall(r"accuracy ([\d.]+)%", done.output)
            assert len(accuracies) == 3 and len(set(accuracies)) == 1 and float(accuracies[0]) > 60, done.output
    assert np.abs(found["numpy"]["weight"]).max() > 0.01
    for name, value in found["numpy"].items():
        np.testing.assert_allclose(found["mixed"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("example", ["numpy_logistic.py", "sklearn_sgd.py"])
def test_models_without_a_framework_train_with_every_policy(commands: Any, example: str, way: str) -> None:
    small = (str(EXAMPLES / example), "--epochs", "1", "--samples", "12000")
    done = commands.run("run", "-w", "2", *WAYS[way], *small)
    assert done.code == 0, done.output
    (accuracy,) = re.findall(r"test accuracy +([\d.]+)%", done.output)
    assert float(accuracy) > 65, done.output


#: As in examples/sklearn_sgd.py: the servers add up what `partial_fit` has changed.
PARTIAL_FIT = """
    from sklearn.linear_model import SGDClassifier
    from sklearn.metrics import log_loss

    model = SGDClassifier(loss="log_loss", alpha=1e-4, learning_rate="constant", eta0=0.05, random_state=0)
    model.partial_fit(np.zeros((2, 4), np.float32), [0, 1], [0, 1])  # makes coef_ and intercept_
    first = {"coef": np.zeros_like(model.coef_), "intercept": np.zeros_like(model.intercept_)}
    params = job.kv.register(first, syncline.Rule("Add"))

    def take(params):
        model.coef_, model.intercept_ = params["coef"].copy(), params["intercept"].copy()

    def change_of(params, x, y):
        take(params)
        model.partial_fit(x, y)
        return {"coef": model.coef_ - params["coef"], "intercept": model.intercept_ - params["intercept"]}

    def mean_loss(params):
        take(params)
        return log_loss(y, model.predict_proba(x))
"""


@pytest.mark.parametrize("way", WAYS)
def test_partial_fit_with_a_worker_that_is_killed(commands: Any, way: str) -> None:
    """The loss falls as in one process, and each sample counts once per epoch. A worker that comes back goes on from
    the servers' sum, not from the first values of its model.
    """
    check_a_kill(commands, PARTIAL_FIT, way)
