"""Whole jobs that save, are broken off, and are taken up again."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
from tests.launch.saved import EPOCHS, NUM_SAMPLES, SCRIPT, break_off, expected, once_each, result, saved
from tests.patience import PATIENCE, PATIENT_TOML

WORDS = ("run", "--checkpoint", "saves", "--save-every", "4steps")


@pytest.mark.proof
def test_a_job_that_was_killed_goes_on_and_ends_as_if_it_had_not_been(commands: Any) -> None:
    """Bit by bit: parameters, momenta, samples, random numbers and what the script keeps for itself."""
    script, saves = commands.script(SCRIPT), commands.folder / "saves"
    process = commands.start(*WORDS, "-w", "2", "-s", "2", script, "0.15")
    break_off(commands, process, saves, count=2)
    name = saved(saves)[-1]
    again = commands.run(*WORDS, "-w", "2", "-s", "2", script, "0.02")
    assert again.code == 0, again.output
    assert re.search(
        rf"resumes from \S+/{name}: step \d+, epoch \d, saved \d+ s ago by 2 servers and 2 workers", again.output
    )
    assert once_each(result(again.output)[1])
    assert result(again.output) == expected()
    steps = NUM_SAMPLES // 8 * EPOCHS
    assert saved(saves)[-1].endswith(f"step-{steps}"), "the end of the job is saved too"
    assert re.search(r"checkpoints  \d+ saved\s+in\s+\S+;\s+the\s+last:\s", again.output), again.output


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("-w", "2", "-s", "2"), ("-w", "1", "-s", "3", "--policy", "async")),
        (("-w", "2", "-s", "2", "--policy", "async"), ("-w", "4", "-s", "1")),
        (("-w", "2", "-s", "2", "--replicas", "2", "--policy", "bounded:2"), ("-w", "2", "-s", "5")),
    ],
    ids=["fewer workers, more servers", "more workers, one server", "two replicas"],
)
def test_other_numbers_and_another_policy_lose_and_repeat_no_sample(commands: Any, before: Any, after: Any) -> None:
    script, saves = commands.script(SCRIPT), commands.folder / "saves"
    process = commands.start(*WORDS, *before, script, "0.15")
    break_off(commands, process, saves, count=2)
    again = commands.run(*WORDS, *after, script, "0.01")
    assert again.code == 0, again.output
    assert "resumes from" in again.output
    assert once_each(result(again.output)[1]), again.output


#: Seen by every process before its own program: members wait for the launcher's word that all are to end, and the
#: save for them, as long as it takes.
PATIENT_SITE = f"""
import sys
from syncline.core.checkpoint import snapshot
from syncline.launch import lifeline

snapshot.SNAPSHOT_SECONDS = lifeline.WORD_SECONDS = {PATIENCE}
if sys.orig_argv[-1] == "server-0":
    from syncline.server.snapshot_barrier import SnapshotBarrierService
    SnapshotBarrierService.__init__.__kwdefaults__["barrier_seconds"] = {PATIENCE}
"""
#: `syncline`, which makes a file when it has learnt that the job has begun: before that it saves none.
TELLS_WHEN_FORMED = """
import pathlib
from syncline.cli.main import main
from syncline.launch.launcher import Launcher

learn = Launcher._learn
def learn_and_tell(self, standings):
    learn(self, standings)
    if standings.formed:
        pathlib.Path("formed").touch()
Launcher._learn = learn_and_tell
main()
"""
#: No worker comes to the end of its script before a save is asked for.
UNTIL_A_SAVE = """time.sleep(pause)
        while pause and own["steps"] == 20 and not job.checkpoints.saves._number:
            time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("whom", ["the launcher", "everybody"])
def test_sigterm_of_the_whole_job_saves_first(commands: Any, whom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster may send it to every process of a job at once."""
    folder = commands.folder
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(PATIENT_SITE)
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"), prepend=os.pathsep)
    (folder / "syncline.toml").write_text(PATIENT_TOML + f"save_seconds = {PATIENCE}\n")
    script, saves = commands.script(SCRIPT.replace("time.sleep(pause)\n", UNTIL_A_SAVE)), folder / "saves"
    words = ("run", "--checkpoint", "saves", "-w", "2", "-s", "1", script)
    process = commands.start(*words, "0.2", program=("-c", TELLS_WHEN_FORMED))
    commands.wait_for("at work", "worker-0")
    deadline = time.monotonic() + PATIENCE
    while not (folder / "formed").exists():
        assert time.monotonic() < deadline, "the launcher does not look at its job"
        time.sleep(0.02)
    told = [process.pid, *(commands.members().values() if whom == "everybody" else ())]
    for number in reversed(told):
        os.kill(number, signal.SIGTERM)
    ended = commands.finish(process)
    assert ended.code == 128 + signal.SIGTERM, ended.output
    assert re.search(r"SIGTERM: the job is saved, then it ends\n(.*\n)*.*saved 000001-step-\d+", ended.output), (
        ended.output
    )
    assert len(saved(saves)) == 1
    again = commands.run(*words, "0")
    assert again.code == 0 and once_each(result(again.output)[1]), again.output


@pytest.mark.slow
@pytest.mark.proof
def test_fresh_starts_over_beside_it_and_resume_from_it(commands: Any) -> None:
    script, saves = commands.script(SCRIPT), commands.folder / "saves"
    process = commands.start(*WORDS, "-w", "1", "-s", "1", script, "0.1")
    break_off(commands, process, saves, count=1)
    first = saved(saves)[0]
    other = commands.run("run", "--checkpoint", "others", "--resume", f"saves/{first}", "-s", "1", script, "0")
    assert other.code == 0 and f"resumes from {saves}/{first}" in other.output, other.output
    assert once_each(result(other.output)[1])
    fresh = commands.run(*WORDS, "--fresh", "-w", "1", "-s", "1", script, "0")
    assert fresh.code == 0 and "resumes from" not in fresh.output, fresh.output
    assert first in saved(saves), "another lineage's is left alone"
    assert result(fresh.output)[2] == NUM_SAMPLES // 4 * EPOCHS


@pytest.mark.slow
@pytest.mark.proof
def test_embedded_jobs_save_and_go_on_too(commands: Any) -> None:
    """One process, no launcher: by syncline.toml."""
    script, saves = commands.script(SCRIPT), commands.folder / "saves"
    (commands.folder / "syncline.toml").write_text('checkpoint = "saves"\nsave_every = "4steps"\n')
    whole = commands.finish(commands.start("0", program=(script,)))
    assert whole.code == 0, whole.output
    for path in sorted(saves.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    process = commands.start("0.3", program=(script,))
    break_off(commands, process, saves, count=1, after="syncline.toml")
    again = commands.finish(commands.start("0", program=(script,)))
    assert again.code == 0 and "resumes from" in again.output, again.output
    assert result(again.output) == result(whole.output)


@pytest.mark.proof
def test_another_model_is_refused_with_the_remedy(commands: Any) -> None:
    script, saves = commands.script(SCRIPT), commands.folder / "saves"
    process = commands.start(*WORDS, "-w", "1", "-s", "1", script, "0.1")
    break_off(commands, process, saves, count=1)
    other = commands.script(SCRIPT.replace("np.zeros(8)", "np.zeros(9)"), "other.py")
    refused = commands.run(*WORDS, "-w", "1", "-s", "1", other, "0")
    assert refused.code == 1, refused.output
    assert "'x' as float64[9], the checkpoint" in refused.output and "--fresh" in refused.output


STOPPED = """
import numpy as np
import syncline, syncline.data

job = syncline.init()
job.kv.register({"x": np.zeros(8)}, syncline.Rule("Add"), reduce="sum")
job.state["own"] = own = {"epochs": 0}
source = syncline.data.ArraySource(np.arange(48))
for epoch in range(5):
    for batch in syncline.data.batches(source, 8, epoch=epoch, name="train"):
        print("IN", epoch, own["epochs"], flush=True)
        job.kv.push_pull({"x": np.ones(8)}).wait()
    own["epochs"] += 1
"""


@pytest.mark.proof
def test_what_a_script_does_after_a_stop_is_not_what_is_taken_up(commands: Any) -> None:
    """A stopped script runs through the epochs that it does not read, and steps its schedulers there."""
    script = commands.script(STOPPED)
    stopped = commands.run("run", "--checkpoint", "saves", "--max-steps", "8", script)
    assert stopped.code == 0 and "stopped by   --max-steps 8" in stopped.output, stopped.output
    again = commands.run("run", "--checkpoint", "saves", "--max-steps", "14", script)
    assert again.code == 0, again.output
    assert re.findall(r"IN (\d) (\d)", again.output) == [("1", "1")] * 4 + [("2", "2")] * 2, again.output
