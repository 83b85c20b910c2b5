"""Several servers as real processes: what a commit does next follows from their answers, whoever reads them.

In one process: tests/worker/test_several_servers.py."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.proof
def test_a_thousand_slices_are_uploaded_over_a_unix_socket(commands: Any) -> None:
    """Answers that nobody reads yet must not fill the socket: server and worker would wait for each other."""
    script = commands.script("""
        import numpy as np, syncline
        job = syncline.init(slice_bytes=8192, wait_seconds=300)
        job.kv.register({"w": np.zeros(1000 * 2048, np.float32)}, syncline.Rule("SGD", lr=1.0))
        out = job.kv.push_pull({"w": np.ones(1000 * 2048, np.float32)}).wait()
        print(len(list(job.exchange.layout.slices())), bool((out["w"] == -1).all()))
    """)
    result = commands.run("run", script)
    assert result.code == 0 and "1000 True" in result.output, result.output


@pytest.mark.proof
def test_a_push_counts_although_its_worker_does_not_wait_for_it(commands: Any) -> None:
    """With two servers the commit follows the acknowledgements: the other worker must not wait for this script."""
    script = commands.script("""
        import numpy as np, syncline, time
        job = syncline.init(wait_seconds=300)
        job.kv.register({"w": np.zeros(1000, np.float32)}, syncline.Rule("SGD", lr=1.0))
        job.barrier("registered")
        ticket = job.kv.push({"w": np.ones(1000, np.float32)})
        if job.rank == 1:
            ticket.wait()
            print("the round is applied", flush=True)
            open("applied", "w").close()
        else:
            import os
            until = time.monotonic() + 300
            while not os.path.exists("applied") and time.monotonic() < until:
                time.sleep(0.01)
            print("seen" if os.path.exists("applied") else "never", flush=True)
            ticket.wait()
    """)
    result = commands.run("run", "-w", "2", "-s", "2", script)
    assert result.code == 0 and "seen" in result.output, result.output


@pytest.mark.proof
def test_the_norm_over_two_servers_and_answers_in_parts(commands: Any) -> None:
    """More than a small answer, so that parts leave while the round is applied: as many answers as questions."""
    script = commands.script("""
        import torch, syncline
        from syncline.torch import DistributedOptimizer
        job = syncline.init(wait_seconds=300)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        opt = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model, clip_norm=0.1)
        for _ in range(4):
            model(torch.randn(4, 512)).sum().backward()
            opt.step()
            opt.zero_grad()
        print("sum", sum(float(p.double().sum()) for p in model.parameters()), flush=True)
    """)
    result = commands.run("run", "-w", "2", "-s", "2", "--transport", "tcp", script)
    assert result.code == 0, result.output
    sums = {line.split("sum ")[1] for line in result.output.splitlines() if "sum " in line}
    assert len(sums) == 1, result.output
