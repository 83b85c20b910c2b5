"""`make proof`: early stop, best model and averaging on Fashion-MNIST: best has the best metric of the run."""

from __future__ import annotations

import json
import pathlib
import re
import sys

import pytest
from tests import forked
from tests.proof.best import accuracy_of, held_out, lenet

import syncline

SCRIPT = pathlib.Path(__file__).parent / "best.py"


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("policy", "average"), [("sync", "ema:0.98"), ("async", "ema:0.98"), ("sync", "last:3"), ("bounded:2", "")]
)
def test_the_best_file_has_the_best_metric_of_the_run(policy: str, average: str, tmp_path: pathlib.Path) -> None:
    """Trained until two validations in a row are no better, or to the end; then measured again from disk, without a
    job.
    """
    saves = tmp_path / "saves"
    options = [
        "-w",
        "2",
        "-s",
        "2",
        "--policy",
        policy,
        "--checkpoint",
        str(saves),
        "--best",
        "accuracy",
        "--keep",
        "2",
    ]
    options += ["--stop", "accuracy.plateau(2)", *(["--average", average] if average else [])]
    command = [sys.executable, "-m", "syncline", "run", *options, str(SCRIPT), "100steps", "4"]
    done = forked.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    fact = json.loads((saves / "best").read_text())
    model = lenet()
    model.load_state_dict(syncline.load_state_dict(saves / "best"))
    found = accuracy_of(model, held_out()[1])
    live, averages = (
        [float(value) for value in re.findall(rf"validation at step \d+: .*?{which}accuracy ([\d.]+)", told)]
        for which in ("", "(?:average|mean): ")
    )
    print(
        f"{policy}, {average or 'no average'}: best {found:.4f} of {len(live)} validations, "
        f"{fact.get('weights', 'weights')} of step {fact['step']}",
        flush=True,
    )
    assert found == pytest.approx(fact["value"], abs=1e-9)
    assert found >= max([*live, *averages]) - 1e-6
    assert bool(averages) == bool(average)
    # Pushes that were on their way when training stopped make one more validation, of the end.
    before, stop, _ = told.partition("training stops by --stop 'accuracy.plateau(2)'")
    validated = [float(value) for value in re.findall(r"validation at step \d+: accuracy ([\d.]+)", before)]
    assert len(validated) >= 3
    is_flat = [max(validated[:n]) >= max(validated[n : n + 2]) for n in range(1, len(validated) - 1)]
    assert not any(is_flat[:-1]), "it goes on although two in a row are no better"
    assert bool(stop) == is_flat[-1], told
    assert ("stopped by   --stop 'accuracy.plateau(2)'" in told) == bool(stop), told
