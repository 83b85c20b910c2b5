"""A ring inside one process: every worker has its server, and they live and die together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from syncline import Rule
from syncline.core.wire.control import Died, Scale, Standings, Watch
from syncline.errors import ConfigError
from syncline.net.memory import pair
from syncline.net.rpc import Endpoint, Stamp
from syncline.net.transport import Peer
from syncline.testing import local_job
from syncline.torch import DistributedOptimizer
from syncline.worker.job import Job

SECONDS = 60.0


def trained(job: Job) -> torch.Tensor:
    model, values = torch.nn.Linear(8, 4), torch.Generator().manual_seed(0)  # torch's own is that of all threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=values) - 0.5)
    opt = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    batches = torch.Generator().manual_seed(job.rank)
    for _ in range(4):
        model(torch.randn(5, 8, generator=batches)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_ring_and_servers_give_the_same_parameters(workers: int) -> None:
    with local_job(workers, exchange="ring", slice_bytes=64) as job:
        names = sorted(job.coordinator.membership.state.members)
        ours = job.run(trained)
    assert names == [f"server-{k}" for k in range(workers)] + [f"worker-{k}" for k in range(workers)]
    with local_job(workers, slice_bytes=64) as job:
        theirs = job.run(trained)
    assert all(torch.equal(one, ours[0]) for one in ours)
    torch.testing.assert_close(ours[0], theirs[0])


@pytest.mark.parametrize("name", ["worker-1", "server-1"])
def test_who_dies_takes_the_other_member_of_its_process_along(name: str) -> None:
    with local_job(2, exchange="ring", slice_bytes=64) as job:
        members = job.coordinator.membership.state.members

        def begin(one: Job) -> None:
            one.kv.register({"w": np.zeros(64, np.float32)}, Rule("SGD", lr=1.0))
            one.kv.push_pull({"w": np.ones(64, np.float32)}).wait()

        job.run(begin)
        job.kill(name)
        assert sorted(members) == ["server-0", "worker-0"]
        out = job[0].kv.push_pull({"w": np.ones(64, np.float32)}).wait()
        assert (out["w"] == -2).all(), "nothing was lost, and nothing counts twice"
        job.jobs.pop().abandon()
        job.add_worker("worker-1")
        assert sorted(members) == ["server-0", "server-1", "worker-0", "worker-1"]


def ask(job: Any, message: Any) -> Any:
    """As the launcher does."""
    left, right = pair(Peer("launcher", "launcher", 0), Peer("coordinator", "coordinator", 0))
    Endpoint(right, Stamp("job"), job.coordinator)
    endpoint = Endpoint(left, Stamp("job"))
    try:
        return endpoint.call(message).wait(SECONDS)
    finally:
        endpoint.close()


def test_a_process_that_ended_was_both_members() -> None:
    """Also after its worker has left: its server was there still."""
    with local_job(3, exchange="ring") as job:
        coordinator = job.coordinator
        ask(job, Died("worker-1", "was killed by SIGKILL"))
        assert "server-1" not in coordinator.membership.state.members
        assert set(coordinator.membership.awaited) == {"worker-1", "server-1"}
        job.jobs.pop().close()  # worker-2 leaves
        assert "server-2" in coordinator.membership.state.members
        ask(job, Died("worker-2", "was killed by SIGKILL", comes_back=False, ends_job=False))
        assert sorted(coordinator.membership.state.members) == ["server-0", "worker-0"]
        job.jobs.pop().abandon()


def test_scaling_goes_by_workers_and_the_launcher_starts_no_servers() -> None:
    with local_job(2, exchange="ring", most_workers=4) as job:
        with pytest.raises(ConfigError, match=r"this job is a ring: .* give the number of workers with -w"):
            ask(job, Scale(3, 3))
        ask(job, Scale(3, None))
        standings = ask(job, Watch())
        assert isinstance(standings, Standings) and standings.wanted == {"worker": 3}
        assert job.coordinator.membership.state.wanted == {"worker": 3, "server": 3}
        ask(job, Scale(1, None))
        standings = ask(job, Watch())
        assert standings.retiring == ["worker-1"], "its server leaves with it, by itself"


def test_servers_are_not_said_in_a_ring() -> None:
    with (
        pytest.raises(ConfigError, match="--exchange ring and -s 2 cannot be combined"),
        local_job(2, 2, exchange="ring"),
    ):
        pass
