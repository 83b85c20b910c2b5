"""`init()` without a launcher: a whole job in the process itself, or beside it when torch is not there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

from tests.patience import JOB_PATIENCE


def python(commands: Any, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        cwd=commands.folder,
        capture_output=True,
        text=True,
        timeout=JOB_PATIENCE,
    )


def test_with_torch_everything_is_in_the_process(commands: Any) -> None:
    """Beside a process group that is there already it works, and says that DDP on top would average twice."""
    done = python(
        commands,
        """
        import os, torch, torch.distributed as dist, syncline
        from syncline.torch import DistributedOptimizer
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        threads = torch.get_num_threads()
        job = syncline.init(policy="async")
        assert syncline.init() is job is syncline.current_job()
        job.kv.register({"x": torch.zeros(3)}, syncline.Rule("Adam", lr=0.5))
        pulled = job.kv.push_pull({"x": torch.ones(3)}).wait()["x"].round(decimals=3).tolist()
        print(pulled, job.config.policy, job.world_size)
        assert torch.get_num_threads() == threads  # the user's own setting is left alone
        assert not [d for d in os.listdir(".") if d == "runs"]
        model = torch.nn.Linear(2, 2)
        for _ in range(2):
            opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        print("stepped")
        dist.destroy_process_group()
    """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[-0.5, -0.5, -0.5] async 1", "stepped"]
    assert done.stderr.count("DistributedDataParallel on top of this would average twice") == 1


def test_without_torch_the_server_is_a_child_and_goes_with_the_script(commands: Any) -> None:
    done = python(
        commands,
        """
        import sys, numpy as np, syncline
        job = syncline.init()
        job.kv.register({"x": np.zeros(3)}, syncline.Rule("Adam", lr=0.5))
        print(job.kv.push_pull({"x": np.ones(3)}).wait()["x"].round(3).tolist(), "torch" in sys.modules)
    """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[-0.5, -0.5, -0.5] False"
    commands.check_nothing_left()


def test_a_mistake_in_the_script_shows_its_own_line_and_none_of_ours(commands: Any) -> None:
    (commands.folder / "mine.py").write_text(
        textwrap.dedent("""
        import torch, syncline
        job = syncline.init()
        job.kv.register({"x": torch.zeros(3)}, syncline.Rule("SGD", lr=0.5))
        job.kv.push({"x": torch.zeros(4)})
    """)
    )
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=commands.folder, capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    assert done.returncode == 1
    assert 'mine.py", line 5' in done.stderr and "syncline/client" not in done.stderr
    assert "syncline.LayoutError: worker-0 pushes 'x' as float32[4], the job has float32[3]" in done.stderr


def test_what_only_the_launch_can_say(commands: Any) -> None:
    done = python(
        commands,
        """
        import syncline
        for given in ({"polcy": "sync"}, {"policy": "sync", "window": 2}):
            try:
                syncline.init(**given)
            except ValueError as error:
                print(error)
        syncline.init(workers=4)
    """,
    )
    assert done.returncode == 1 and "this is said at launch, e.g. syncline run -w 2 -s 1" in done.stderr
    unknown, window = done.stdout.splitlines()
    assert "init(): unknown setting 'polcy'; there are: ack, " in unknown
    assert "--window 2 needs --policy bounded:K or async" in window
