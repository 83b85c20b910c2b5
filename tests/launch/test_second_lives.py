"""Workers that are killed and started again, with scripts as people write them: nothing is trained twice."""

from __future__ import annotations

from typing import Any

import pytest

KILL = """
    import os, pathlib, signal, sys, time

    def wait_for(name):
        while not pathlib.Path(name).exists():
            time.sleep(0.02)

    def die(job, at, made):
        # Once: the flag outlives the process.
        if job.name == sys.argv[1] and made == at and not pathlib.Path("died").exists():
            pathlib.Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def keep_pace(job, made):
        # The other one leaves something to do: for the first life, and for the second.
        if job.name == sys.argv[1] and job.life.number == 2:
            pathlib.Path("back").touch()
        elif job.name != sys.argv[1] and made in (10, 25):
            wait_for("died" if made == 10 else "back")
"""
STEPS = (
    KILL
    + """
    import numpy as np, syncline

    job = syncline.init()
    job.kv.register({"w": np.zeros(1)}, syncline.Rule("SGD", lr=1.0))
    print(f"{job.name} life {job.life.number} begins at {job.step}", flush=True)
    made = 0
    keep_pace(job, made)
    for step in job.steps(60):
        keep_pace(job, made)
        die(job, 5, made)
        job.kv.push_pull({"w": np.ones(1)}).wait()
        made += 1
    job.barrier("end")
    print(f"MADE {job.name} life {job.life.number} {made} w {job.kv.pull()['w'][0]:g} step {job.step}", flush=True)
"""
)
PLAIN = (
    KILL
    + """
    import numpy as np, syncline

    job = syncline.init()
    job.kv.register({"w": np.zeros(1)}, syncline.Rule("SGD", lr=1.0))
    for step in range(40):
        if step == 30:
            time.sleep(1.2)  # what it does is known by then
        die(job, 30, step)
        while step == 31 and job.name != sys.argv[1] and job.life.number == 1 and job.world_size > 1:
            time.sleep(0.05)  # until the other one is out
        job.kv.push_pull({"w": np.ones(1)}).wait()
    print(f"MADE {job.name} w {job.kv.pull()['w'][0]:g} step {job.step} chief {job.is_chief}", flush=True)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "victim"),
    [
        pytest.param(("--policy", "sync"), "worker-1", marks=pytest.mark.proof),
        (("--policy", "sync"), "worker-0"),
        pytest.param(("--policy", "async"), "worker-1", marks=pytest.mark.proof),
        pytest.param(("--exchange", "ring"), "worker-1", marks=pytest.mark.proof),
    ],
)
def test_steps_of_the_job_are_made_once_with_a_kill(commands: Any, options: tuple[str, ...], victim: str) -> None:
    """The one that is back makes no step that was made before, and the job no step more than was asked for."""
    result = commands.run("run", "-w", "2", *options, commands.script(STEPS), victim)
    assert result.code == 0, result.output
    made = [line.split(" | ")[-1] for line in result.output.splitlines() if "MADE" in line]
    assert len(made) == 2 and all("w -60 step 60" in line for line in made), result.output
    assert any(f"MADE {victim} life 2" in line for line in made), result.output
    begun = [line for line in result.output.splitlines() if f"{victim} life 2 begins at" in line]
    assert begun and int(begun[0].split()[-1]) >= 5, result.output


TWO_COMMITS = (
    STEPS.replace(
        """        job.kv.push_pull({"w": np.ones(1)}).wait()
        made += 1
""",
        """        job.kv.push_pull({"w": np.ones(1)}).wait()
        if job.name != sys.argv[1] and made == 26:
            wait_for("back")
            time.sleep(1.0)  # the other one enters, and finds this one in the middle of a step
        job.kv.push_pull({"v": np.ones(1)}).wait()
        made += 1
""",
    )
    .replace("keep_pace(job, made)\n        die", "die")
    .replace(
        "    made = 0\n", '    job.kv.register({"v": np.zeros(1)}, syncline.Rule("SGD", lr=1.0))\n    made = 0\n'
    )
)


@pytest.mark.proof
@pytest.mark.slow
def test_a_second_life_begins_its_step_with_the_others(commands: Any) -> None:
    """Two optimizers make two commits of a step. One that came back committed the first of them in the round of the
    others' second, so that each round updated both models: 93 updates in place of 60."""
    assert TWO_COMMITS.count("push_pull") == 2 and 'wait_for("back")' in TWO_COMMITS
    result = commands.run("run", "-w", "2", commands.script(TWO_COMMITS), "worker-1")
    assert result.code == 0, result.output
    made = [line for line in result.output.splitlines() if "MADE" in line]
    assert len(made) == 2 and all("w -60 step 60" in line for line in made), result.output


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "total"), [pytest.param("sync", 40, marks=pytest.mark.proof), ("async", 70)])
def test_a_script_without_positions_is_not_started_again(commands: Any, policy: str, total: int) -> None:
    """It would make its 30 steps a second time. The job goes on without it, and says what would help."""
    result = commands.run("run", "-w", "2", "--policy", policy, commands.script(PLAIN), "worker-0")
    assert result.code == 0, result.output
    assert f"MADE worker-1 w -{total} step {total} chief True" in result.output
    told = [
        line
        for line in result.output.splitlines()
        if "worker-0 was killed by SIGKILL" in line and "job.steps" in line
    ]
    assert told and "not restarted" in told[0] and "job.resume_at" in told[0], result.output


@pytest.mark.proof
@pytest.mark.slow
def test_the_only_worker_of_a_script_without_positions_fails_with_its_exit_code(commands: Any) -> None:
    result = commands.run("run", "-w", "1", commands.script(PLAIN), "worker-0")
    assert result.code == 137 and "the job has failed: worker-0 was killed by SIGKILL" in result.output, result.output
    assert "MADE" not in result.output


@pytest.mark.proof
@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_where_the_job_is(commands: Any) -> None:
    """`range(job.resume_at(), n)`: in rounds the others have gone on, and no round is added at the end."""
    slow = 'if pathlib.Path("died").exists() and job.life.number == 1:\n            time.sleep(0.5)'
    script = PLAIN.replace("range(40)", "range(job.resume_at(), 40)")
    script = script.replace("if step == 30:", f"{slow}\n        if step == 30:").replace("step == 31", "False")
    result = commands.run("run", "-w", "2", commands.script(script), "worker-1")
    assert result.code == 0, result.output
    assert "MADE worker-0 w -40 step 40" in result.output and "started again" not in result.output
    assert "MADE worker-1 w -40 step 40" in result.output, result.output


SCHEDULE = (
    KILL
    + """
    import torch, syncline
    from syncline.torch import DataLoader, DistributedOptimizer

    torch.manual_seed(0)
    job = syncline.init()
    model = torch.nn.Linear(4, 3)
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    SCHED
    loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(400, 4)), batch_size=4)
    number = 0
    keep_pace(job, number)
    for (x,) in loader:
        HAND
        if number == 0:
            print(f"FIRST {job.name} life {job.life.number} lr {opt.param_groups[0]['lr']:.2e}", flush=True)
        keep_pace(job, number)
        if job.name == sys.argv[1] and number < 20:
            time.sleep(0.05)
        elif job.name != sys.argv[1] and number > 25:
            time.sleep(0.2)
        if number == 20:
            time.sleep(1.0)  # what its schedule has come to is told by then
        die(job, 20, number)
        model(x).sum().backward()
        opt.step(); opt.zero_grad()
        STEP
        number += 1
    print(f"MADE {job.name} {number}", flush=True)
"""
)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["found", "in job.state"])
def test_a_schedule_goes_on_in_a_second_life(commands: Any, kind: str) -> None:
    """In `async` each worker pushes with its own learning rate: 0.8 ** 20 is 1 % of the first one."""
    made = "sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)"
    made += '; job.state["sched"] = sched' if kind == "in job.state" else ""
    script = SCHEDULE.replace("SCHED", made).replace("HAND", "pass").replace("STEP", "sched.step()")
    result = commands.run("run", "-w", "2", "--policy", "async", commands.script(script), "worker-1")
    assert result.code == 0, result.output
    first = [line.split("lr ")[1] for line in result.output.splitlines() if "FIRST worker-1 life 2" in line]
    assert first and float(first[0]) < 0.1, result.output


EPOCHS = (
    KILL
    + """
    import torch, syncline
    from syncline.torch import DataLoader, DistributedOptimizer

    torch.manual_seed(0)
    job = syncline.init()
    model = torch.nn.Linear(4, 3)
    opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 4)), batch_size=4)
    is_second = job.life.number == 2
    if is_second:
        wait_for("third")  # until the other one is in the middle of it
    for epoch in loader.epochs(5):
        print(f"EPOCH {job.name} life {job.life.number} epoch {epoch} lr {opt.param_groups[0]['lr']:g}", flush=True)
        if is_second:
            pathlib.Path("back").touch()
        for number, (x,) in enumerate(loader):
            if job.name != sys.argv[1] and number == 2:
                wait_for("died")
            elif job.name != sys.argv[1] and (epoch, number) == (3, 9):
                pathlib.Path("third").touch()
                wait_for("back")
            die(job, 1, number)
            opt.zero_grad(); model(x).sum().backward(); opt.step()
        sched.step()
"""
)


@pytest.mark.proof
def test_a_schedule_by_epochs_follows_the_epochs_that_a_second_life_leaves_out(commands: Any) -> None:
    """Its own state is that of epoch 0, where it died: a scheduler that steps once in an epoch would be behind."""
    result = commands.run("run", "-w", "2", "--policy", "async", commands.script(EPOCHS), "worker-1")
    assert result.code == 0, result.output
    lines = [line.split("EPOCH ")[1].split() for line in result.output.splitlines() if "EPOCH " in line]
    rates = {(name, int(life), int(epoch)): float(rate) for name, _, life, _, epoch, _, rate in lines}
    assert ("worker-1", 2, 3) in rates, result.output
    assert all(rate == 0.5**epoch for (_, _, epoch), rate in rates.items()), result.output


@pytest.mark.proof
def test_a_schedule_by_hand_that_begins_again_leaves(commands: Any) -> None:
    hand = "opt.param_groups[0]['lr'] = 0.8 ** number"
    script = SCHEDULE.replace("SCHED", "pass").replace("HAND", hand).replace("STEP", "pass")
    result = commands.run("run", "-w", "2", "--policy", "async", commands.script(script), "worker-1")
    assert result.code == 0, result.output
    assert "learning rate of 1" in result.output and "syncline.torch.schedule" in result.output
    assert "MADE worker-0 " in result.output and "MADE worker-1" not in result.output
