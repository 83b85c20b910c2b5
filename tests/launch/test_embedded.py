"""`init()` without a launcher: a whole job in the process itself, or beside it when torch is not there."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest
from tests.patience import JOB_PATIENCE

import syncline
from syncline.launch import tracebacks


def python(commands: Any, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=commands.folder,
        capture_output=True,
        text=True,
        timeout=JOB_PATIENCE,
    )


def test_with_torch_everything_is_in_the_process(commands: Any) -> None:
    """Beside a process group that is there already it works, and says that DDP on top would average twice. A mistake
    shows the script's own line, and none of ours. torch's compiler is not loaded for any of it."""
    text = """
        import os, sys, torch, torch.distributed as dist, syncline
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
        print("stepped", "torch._dynamo" in sys.modules, flush=True)
        dist.destroy_process_group()
        job.kv.push({"x": torch.zeros(4)})
    """
    done = python(commands, commands.script(text, "mine.py"))
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["[-0.5, -0.5, -0.5] async 1", "stepped False"], done.stderr
    assert done.stderr.count("DistributedDataParallel on top of this would average twice") == 1
    assert f'mine.py", line {len(text.splitlines()) - 1}' in done.stderr and "syncline/client" not in done.stderr
    assert "syncline.LayoutError: worker-0 pushes 'x' as float32[4], the job has float32[3]" in done.stderr


def test_without_torch_the_server_is_a_child_and_goes_with_the_script(commands: Any) -> None:
    script = commands.script("""
        import sys, numpy as np, syncline
        job = syncline.init()
        job.kv.register({"x": np.zeros(3)}, syncline.Rule("Adam", lr=0.5))
        print(job.kv.push_pull({"x": np.ones(3)}).wait()["x"].round(3).tolist(), "torch" in sys.modules)
    """)
    done = python(commands, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[-0.5, -0.5, -0.5] False"
    commands.check_nothing_left()


def test_what_only_the_launch_can_say(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Said before anything starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracebacks, "shorten_tracebacks", lambda: None)
    with pytest.raises(ValueError, match=r"init\(\): unknown setting 'polcy'; choose from: ack, "):
        syncline.init(polcy="sync")
    with pytest.raises(ValueError, match=r"--window 2 needs --policy bounded:K or async"):
        syncline.init(policy="sync", window=2)
    with pytest.raises(ValueError, match=r"this is set at launch, e\.g\. syncline run -w 2 -s 1"):
        syncline.init(workers=4)
