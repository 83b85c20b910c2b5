"""A Ray cluster whose hosts come and go."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from tests.engines.clusters import lives, wait_until
from tests.engines.conftest import STEPS, Engine, finished_well
from tests.engines.rays import HOSTS, RayHosts, on_ray

pytestmark = pytest.mark.engines


@pytest.fixture
def hosts(ray_hosts: RayHosts) -> Iterator[RayHosts]:
    """The cluster, with its hosts as they were when the test is over."""
    ray_hosts.changed.clear()
    try:
        yield ray_hosts
    finally:
        for host, is_there in list(ray_hosts.changed.items()):
            if is_there and host not in HOSTS:
                ray_hosts.lose(host)
            elif not is_there and host in HOSTS:
                ray_hosts.add(host)
        ray_hosts.wait_for(len(HOSTS))


def test_the_loss_of_a_host_is_a_death_and_its_members_return_elsewhere(ray: Engine, hosts: RayHosts) -> None:
    """A worker and a server fill each of three hosts; a fourth has room. The launcher's own host, h1, stays."""
    ray.script(STEPS)
    words = ["-w", "3", "-s", "3", "--replicas", "2", "--cpus-per-worker", "3", "--name", "loss", "train.py"]
    process = ray.start(on_ray(*words))
    for name in ("worker-0", "worker-1", "worker-2"):
        ray.lives(name, 1, process)
    pids = {name: int(ray.lives(name, 1, process)[0][0]) for name in ("worker-0", "worker-1", "worker-2")}
    hosts.add("h4")
    hosts.wait_for(4)
    hosts.lose("h3")
    wait_until(lambda: not all(map(lives, pids.values())), "no worker was on h3")
    gone = [name for name, pid in pids.items() if not lives(pid)]
    for name in gone:
        assert float(ray.lives(name, 2, process)[-1][2]) < 0
        ray.goes_on(name)
    ray.end_steps()
    code, output = ray.finish(process)
    assert code == 0 and finished_well(output, 3), output
    assert re.search(r"on h3 is lost \(.*\); with it .*worker-", output), output
    ray.check_nothing_left()
