"""A ring of real processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import syncline
from syncline.testing import local_job

#: Registers, pushes, and ends with the bytes of what came out.
SCRIPT = """
    import numpy as np, os, syncline, sys, time
    job = syncline.init(wait_seconds=120.0, slice_bytes=1024)
    job.kv.register({"w": np.linspace(-1, 1, 2000).astype(np.float32)}, syncline.Rule("Adam", lr=0.1))
    for step in range(int(sys.argv[1])):
        push = np.arange(2000, dtype=np.float32) % 7 + job.rank + step
        out = job.kv.push_pull({"w": push}).wait()
        if job.own_step == 3:
            print("under way", flush=True)
        time.sleep(float(sys.argv[2]))
    if job.rank == 0:
        print("digest", int(out["w"].view(np.uint32).astype(np.uint64).sum()), flush=True)
    print("ended", flush=True)
"""


def pushed(job: Any) -> int:
    """The same in this process, with servers."""
    job.kv.register({"w": np.linspace(-1, 1, 2000).astype(np.float32)}, syncline.Rule("Adam", lr=0.1))
    for step in range(5):
        out = job.kv.push_pull({"w": np.arange(2000, dtype=np.float32) % 7 + job.rank + step}).wait()
    return int(out["w"].view(np.uint32).astype(np.uint64).sum())


def test_two_processes_are_a_whole_ring_and_give_what_servers_give(commands: Any) -> None:
    script = commands.script(SCRIPT.replace("import numpy", "import torch, numpy"))  # computes as servers do
    result = commands.run("run", "-w", "2", "--exchange", "ring", script, "5", "0")
    assert result.code == 0, result.output
    assert "2 workers as a ring, sync; runs " in result.output and result.output.count("ended\n") == 2
    assert not list(commands.folder.glob("runs/*/server-*.log")), "there is no process of a server"
    assert " is out" not in result.output, "nobody was taken for dead"
    with local_job(2, slice_bytes=1024) as job:
        (digest, _) = job.run(pushed)
    assert f"digest {digest}" in result.output


#: The same, beside a default group of torch.distributed that is the script's own.
BESIDE = """
    import torch, torch.distributed as dist
    import syncline
    from syncline.reduce import process_group
    process_group.CONNECT_SECONDS = 60.0  # on a busy machine
    job = syncline.init(slice_bytes=1024)
    dist.init_process_group("gloo", init_method=f"file://{job.folder.resolve()}/theirs", rank=job.rank, world_size=2)
    job.kv.register({"w": torch.linspace(-1, 1, 1000)}, syncline.Rule("Add"))
    for step in range(4):
        job.kv.push({"w": torch.linspace(0, 1 + job.rank, 1000)}).wait()
        mine = torch.full((3,), float(job.rank + step))
        dist.all_reduce(mine)
        assert mine.tolist() == [2.0 * step + 1] * 3
    job.barrier("all")
    numbers = torch.as_tensor(job.kv.pull(["w"])["w"])
    both = [torch.empty_like(numbers), torch.empty_like(numbers)]
    dist.all_gather(both, numbers)
    assert torch.equal(*both), "all ranks have the same, bit by bit"
    dist.destroy_process_group()
    print("ended", flush=True)
"""


@pytest.mark.proof
def test_gloo_adds_up_beside_the_scripts_own_use_of_it(commands: Any) -> None:
    result = commands.run("run", "-w", "2", "--exchange", "ring", "--sums", "gloo", commands.script(BESIDE))
    assert result.code == 0, result.output
    assert result.output.count("ended\n") == 2 and " is out" not in result.output
    assert "terminate called" not in result.output


def test_who_trusts_the_network_is_told_what_that_means(commands: Any) -> None:
    """Both hosts are this one. The script does not join: what is said is said before."""
    remote = ("--remote", "env HOST={host}", "--max-restarts", "0")
    hosts = ("-H", "a:1,b:1", "--bind", "127.0.0.1", *remote, "--trust-network")
    result = commands.run("run", "--exchange", "ring", "--sums", "gloo", *hosts, commands.script("pass"))
    told = "--trust-network: gloo speaks between a, b in the clear, and to anyone who connects"
    assert result.code != 0 and result.output.replace("\n", " ").count(told) == 1, result.output


@pytest.mark.proof
@pytest.mark.parametrize("sums", ["ours", "gloo"])
def test_a_killed_process_costs_nothing_and_comes_back_as_both(commands: Any, sums: str) -> None:
    script = commands.script(SCRIPT.replace("range(int(sys.argv[1]))", "job.steps(int(sys.argv[1]))"))
    job = commands.start("run", "-w", "2", "--exchange", "ring", "--sums", sums, script, "120", "0.1")
    commands.wait_for("under way", "worker-1")
    os.kill(commands.members()["worker-1"], signal.SIGKILL)
    result = commands.finish(job)
    assert result.code == 0, result.output
    assert "worker-1 was killed by SIGKILL" in result.output and "starts again" in result.output
    assert result.output.count("server-1 (incarnation") >= 2, "it is out, and has joined again"
    assert "revoke" not in result.output


def start_uneven(commands: Any, *, workers: int, steps: int, but: dict[str, int]) -> Any:
    """A ring in which the scripts of some end earlier than the others'."""
    script = commands.script(SCRIPT.replace("int(sys.argv[1])", f"{but}.get(job.name, int(sys.argv[1]))"))
    return commands.start("run", "-w", str(workers), "--exchange", "ring", script, str(steps), "0.1")


@pytest.mark.proof
def test_who_ends_early_hands_over_and_who_is_told_to_leave_does_too(commands: Any) -> None:
    """One script ends, one is told to, two go on to their end; nobody is taken for dead."""
    job = start_uneven(commands, workers=4, steps=150, but={"worker-1": 10})
    commands.wait_for("under way", "worker-2")
    os.kill(commands.members()["worker-2"], signal.SIGTERM)
    result = commands.finish(job)
    assert result.code == 0, result.output
    for name in ("server-1", "server-2"):
        assert f"{name} has handed over its slices and leaves" in result.output
    assert " is out" not in result.output and "starts again" not in result.output


@pytest.mark.proof
def test_who_trains_alone_at_the_end_may_die_too(commands: Any) -> None:
    """The other's script has ended, and its process stays as a second copy. Nobody is started again by then, and the
    job ends well: the chief's script has."""
    job = start_uneven(commands, workers=2, steps=80, but={"worker-0": 4})
    commands.wait_for("ended", "worker-0")
    time.sleep(3.0)  # by then it has asked to leave, more than once
    os.kill(commands.members()["worker-1"], signal.SIGKILL)
    result = commands.finish(job)
    assert result.code == 0, result.output
    assert "worker-1 was killed by SIGKILL" in result.output and "not restarted" in result.output
    assert "server-0 has handed over" not in result.output and "revoke" not in result.output
