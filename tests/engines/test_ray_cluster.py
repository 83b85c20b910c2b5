"""A Ray cluster whose hosts come and go, jobs that are submitted to it, and 64 members."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator

import pytest
from tests.engines.clusters import lives, wait_until
from tests.engines.conftest import COUNTS, SPREAD, STEPS, Engine, counted_once, finished_well
from tests.engines.rays import HOSTS, RayHosts, on_ray
from tests.engines.test_ranks import SUMS, sums_of

from syncline.launch.folder import LOCK

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
    """A worker and a server fill each of three hosts; a fourth has room. The launcher's own host, h1, stays. What was
    acknowledged is not lost, and no sample counts twice.
    """
    ray.settings(SPREAD)
    ray.script(COUNTS)
    words = ["-w", "3", "-s", "3", "--replicas", "2", "--policy", "async", "--cpus-per-worker", "3", "--name", "loss"]
    process = ray.start(on_ray(*words, "train.py"))
    names = ("worker-0", "worker-1", "worker-2")
    pids = {name: int(ray.lives(name, 1, process)[0][0]) for name in names}
    for name in names:
        ray.goes_on(name)
    hosts.add("h4")
    hosts.wait_for(4)
    before = ray.counted()
    hosts.lose("h3")
    wait_until(lambda: not all(map(lives, pids.values())), "no worker was on h3")
    gone = [name for name, pid in pids.items() if not lives(pid)]
    for name in gone:
        ray.comes_back(name, before, process)
    ray.end_steps()
    code, output = ray.finish(process)
    assert code == 0 and finished_well(output, 3), output
    assert re.search(r"on h3 is lost \(.*\); with it .*worker-", output), output
    counted_once(output)
    ray.check_nothing_left()


def test_workers_grow_and_shrink_with_the_cluster(ray: Engine, hosts: RayHosts) -> None:
    """Three CPUs of four for each worker: a host has one. Every sample of every epoch counts once."""
    ray.script(COUNTS)
    process = ray.start(
        on_ray("-w", "1:5", "--policy", "async", "--cpus-per-worker", "3", "--name", "grow", "train.py")
    )
    for name in ("worker-0", "worker-1", "worker-2"):
        ray.lives(name, 1, process)
    hosts.add("h4")
    fourth = ray.lives("worker-3", 1, process)[0]
    ray.goes_on("worker-3")
    hosts.lose("h4")
    wait_until(lambda: not lives(int(fourth[0])), "worker-3 lives on")
    ray.goes_on("worker-0")
    hosts.add("h5")  # worker-3 has waited for it; there is no room for one more
    ray.lives("worker-3", 2, process)
    ray.goes_on("worker-3")
    code, output = ray.run(["syncline", "scale", "grow", "--workers", "2"])
    assert code == 0, output
    wait_until(lambda: ray.num_workers() == 2, "none has left")
    ray.goes_on("worker-0")
    ray.end_steps()
    code, output = ray.finish(process)
    assert code == 0 and "the job has finished" in output, output
    assert "hosts have joined the Ray cluster: 4 workers from now on" in output, output
    assert "5 workers from now on" not in output, output
    counted_once(output)
    ray.check_nothing_left()


#: A host with another syncline: what is installed there says so.
OTHER_VERSION = """
import importlib.metadata as metadata
installed = metadata.version
metadata.version = lambda name: "9.9" if name == "syncline" else installed(name)
"""


def test_a_host_that_joins_with_another_version_is_named_and_left_out(ray: Engine, hosts: RayHosts) -> None:
    """That is no death of a member, which would start there again and again: it waits for room on another host."""
    other = ray.folder / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(OTHER_VERSION)
    path = os.pathsep.join(filter(None, [str(other), os.environ.get("PYTHONPATH")]))
    ray.script(STEPS)
    words = on_ray("-w", "1:5", "--cpus-per-worker", "3", "--name", "other", "train.py")
    process = ray.start(["sh", "-c", f"exec {shlex.join(words)} > shown 2>&1"])
    shown = ray.folder / "shown"
    for name in ("worker-0", "worker-1", "worker-2"):
        ray.lives(name, 1, process)
    hosts.add("h4", path=path)
    wait_until(lambda: "worker-3 waits for room on another host" in shown.read_text(), "h4 was not named")
    hosts.add("h5")
    ray.lives("worker-3", 1, process)
    ray.goes_on("worker-3")
    ray.end_steps()
    code, _ = ray.finish(process)
    output = shown.read_text()
    assert code == 0 and finished_well(output, 4), output
    told = r"host h4 of the Ray cluster cannot start members: host h4 has syncline 9\.9, this host \S+: install one"
    assert len(re.findall(told, output)) == 1, output
    assert "starts again" not in output and "is lost" not in output, output
    code, output = ray.run(on_ray("-w", "5", "--cpus-per-worker", "3", "train.py"))  # with one on h4
    assert code == 2 and "host h4 has syncline 9.9" in output and "was killed" not in output, output
    ray.check_nothing_left()


#: Each life leaves its device, and the GPU that this is, in the place of its node.
GPUS = STEPS.replace(
    'os.environ.get("SLURMD_NODENAME", "-")', "f\"{job.device}={os.environ.get('CUDA_VISIBLE_DEVICES', '-')}\""
)


def raylet_of(member: int) -> str:
    """Ray's process on the host of this member: the agent's parent."""
    above = member
    for _ in range(2):
        above = int(pathlib.Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
    assert "raylet" in pathlib.Path(f"/proc/{above}/cmdline").read_text()
    return str(above)


def test_workers_have_gpus_of_their_own_and_servers_are_spread(ray: Engine, hosts: RayHosts) -> None:
    """Two hosts with two GPUs, as far as Ray counts: two workers are packed on one of them, four need both."""
    hosts.add("h4", gpus=2)
    hosts.add("h5", gpus=2)
    hosts.wait_for(5)
    ray.script(GPUS)
    for workers, places in ((2, 1), (4, 2)):
        names = [f"worker-{rank}" for rank in range(workers)]
        process = ray.start(on_ray("-w", str(workers), "-s", "2", "train.py"))
        lives = [ray.lives(name, 1, process)[0] for name in names]
        gpus = [(raylet_of(int(pid)), device) for pid, device, _ in lives]
        servers = [raylet_of(pid) for number in range(2) for pid in ray.members(f"server-{number}")]
        ray.end_steps()
        code, output = ray.finish(process)
        assert code == 0 and finished_well(output, workers), output
        assert len(set(gpus)) == workers and len({host for host, _ in gpus}) == places, gpus
        assert {device for _, device in gpus} == {"cuda:0=0", "cuda:0=1"}, gpus
        assert len(servers) == len(set(servers)) == 2, servers
        for path in (*ray.folder.glob("*.here"), ray.folder / "end"):
            path.unlink()
    ray.check_nothing_left()


def test_what_a_member_leaves_another_one_gets(ray: Engine) -> None:
    """Room that was given back, and room in the common group, which stays."""
    ray.script(STEPS)
    process = ray.start(on_ray("-w", "2:4", "--name", "room", "--cpus-per-worker", "2", "train.py"))
    for workers in (4, 2, 4, 2, 3):
        code, output = ray.run(["syncline", "scale", "room", "--workers", str(workers)])
        if code:  # it has not begun
            ray.lives("worker-0", 1, process)
            code, output = ray.run(["syncline", "scale", "room", "--workers", str(workers)])
        assert code == 0, output
        wait_until(lambda workers=workers: ray.num_workers() == workers, f"there are not {workers} workers")
    ray.end_steps()
    code, output = ray.finish(process)
    assert code == 0 and "the job has finished" in output, output
    assert "is lost" not in output, output
    ray.check_nothing_left()


def test_the_doctor_looks_at_the_cluster(ray: Engine) -> None:
    code, output = ray.run(["syncline", "doctor", "--on", "ray"])
    words = " ".join(output.split())
    assert code == 0 and "3 hosts: 12 CPU" in words, output
    assert re.search(r"(h\d, ){2}h\d: the same versions as here; all see this folder", words), output
    code, output = ray.run(["syncline", "doctor", "--on", "ray"], {"RAY_ADDRESS": "127.0.0.1:9"})
    assert code == 1 and "no Ray cluster is there" in " ".join(output.split()), output
    ray.check_nothing_left()


def test_64_workers_on_three_hosts(ray: Engine) -> None:
    words = ["-w", "64", "-s", "2", "--cpus-per-worker", "0.125", ray.script(SUMS)]
    code, output = ray.run(on_ray(*words))
    assert code == 0, output
    sums_of(output, 64)
    ray.check_nothing_left()


def submitted(ray: Engine, hosts: RayHosts, name: str, *words: str) -> subprocess.Popen[str]:
    """`ray job submit` of a command that runs in the engine's folder, as on a disk that all hosts see."""
    command = ["ray", "job", "submit", "--address", hosts.dashboard, "--submission-id", name, "--"]
    environment = [f"PYTHONPATH={ray.environment['PYTHONPATH']}"] if "PYTHONPATH" in ray.environment else []
    return ray.start([*command, "env", "-C", str(ray.folder), *environment, *words])


def test_a_submitted_job_ends_with_its_own_outcome(ray: Engine, hosts: RayHosts) -> None:
    ray.script(SUMS)
    code, output = ray.finish(submitted(ray, hosts, "sums", *on_ray("-w", "2", "train.py")))
    assert code == 0, output
    sums_of(output, 2)
    ray.script("raise SystemExit(3)")
    code, output = ray.finish(submitted(ray, hosts, "fails", *on_ray("-w", "2", "--max-restarts", "0", "train.py")))
    assert code != 0 and "the job has failed" in output, output
    ray.check_nothing_left()


def test_a_submitted_job_brings_its_own_folder(ray: Engine, hosts: RayHosts) -> None:
    """`--working-dir`: the launcher and its members run in Ray's copies of it."""
    ray.script(SUMS)
    command = ["ray", "job", "submit", "--address", hosts.dashboard, "--working-dir", ".", "--"]
    code, output = ray.run([*command, *on_ray("-w", "2", "train.py")])
    assert code == 0, output
    sums_of(output, 2)
    assert not (ray.folder / "runs").exists()
    ray.check_nothing_left()


def test_a_stopped_job_is_saved_and_leaves_nothing(ray: Engine, hosts: RayHosts) -> None:
    ray.script(STEPS)
    words = on_ray("-w", "2", "-s", "2", "--name", "stopped", "--checkpoint", "saves", "train.py")
    process = submitted(ray, hosts, "stopped", *words)
    ray.lives("worker-1", 1, process)
    ray.goes_on("worker-0")
    code, output = ray.run(["ray", "job", "stop", "--address", hosts.dashboard, "stopped"])
    assert code == 0, output
    ray.finish(process)
    assert list((ray.folder / "saves").glob("*/manifest.json")), "nothing was saved"
    ray.check_nothing_left()
    ray.end_steps()
    code, output = ray.run(on_ray("-w", "2", "-s", "2", "--checkpoint", "saves", "train.py"))
    assert code == 0 and finished_well(output, 2), output
    assert float(ray.lives("worker-0", 2)[-1][2]) < 0, "it went on from the checkpoint"


def test_a_launcher_that_is_killed_leaves_nothing(ray: Engine, hosts: RayHosts) -> None:
    """Ray does so with a job that does not end soon enough after `ray job stop`."""
    ray.script(STEPS)
    process = submitted(ray, hosts, "killed", *on_ray("-w", "2", "-s", "2", "--name", "killed", "train.py"))
    ray.lives("worker-1", 1, process)
    launcher = int((ray.folder / "runs" / "killed" / LOCK).read_text())
    os.kill(launcher, signal.SIGKILL)
    ray.finish(process)
    ray.check_nothing_left()
