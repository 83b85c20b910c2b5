"""Jobs on a real Ray of three hosts on this machine. `make test-engines` makes the environment that has Ray.

Hosts that come and go are in test_ray_cluster.py.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.request

import msgspec
import pytest
from tests.engines.clusters import wait_until
from tests.engines.conftest import BIN, COUNTS, SPREAD, STEPS, Engine, counted_once, finished_well
from tests.engines.rays import RayHosts, on_ray
from tests.engines.test_ranks import SUMS, sums_of
from tests.patience import PATIENCE

pytestmark = pytest.mark.engines

#: Logistic regression on numbers that every run has alike; the result to the last digit.
TRAINS = """
    import numpy as np, syncline
    job = syncline.init()
    rng = np.random.default_rng(7)
    x = rng.normal(size=(400, 8)); y = (x @ rng.normal(size=8) > 0).astype(float)
    mine = slice(job.rank, None, job.world_size)
    job.kv.register({"w": np.zeros(8)}, syncline.Rule("SGD", lr=0.5))
    w = job.kv.pull()["w"].copy()
    for step in range(40):
        error = 1 / (1 + np.exp(-x[mine] @ w)) - y[mine]
        job.kv.push({"w": x[mine].T @ error / len(error)}).wait()
        w = job.kv.pull()["w"].copy()
    job.barrier("done")
    w = job.kv.pull()["w"]
    print(f"RESULT {((x @ w > 0) == y).mean():.4f} {w.tobytes().hex()}", flush=True)
"""


@pytest.mark.smoke
def test_a_job_on_two_hosts_is_as_good_as_on_one(ray: Engine) -> None:
    """To the last digit. Three CPUs of four for each worker: they are on two hosts."""
    script = ray.script(TRAINS)
    code, here = ray.run(["syncline", "run", "--page", "off", "-w", "2", "-s", "1", script])
    assert code == 0, here
    code, there = ray.run(on_ray("-w", "2", "-s", "1", "--cpus-per-worker", "3", script))
    assert code == 0 and finished_well(there, 2), there
    assert re.search(r"2 workers and 1 server on Ray: h\d, h\d", there), there
    results = [re.findall(r"RESULT (0\.\d+) (\w+)", output) for output in (here, there)]
    assert len(results[0]) == len(results[1]) == 2 and len({*results[0], *results[1]}) == 1, results
    assert float(results[0][0][0]) > 0.9
    ray.check_nothing_left()


#: What the cluster's dashboard tells of its jobs and of what runs there.
TABLES = ("api/jobs/", *(f"api/v0/{name}?detail=1" for name in ("actors", "tasks", "placement_groups", "workers")))


def test_secrets_are_in_no_command_line_no_environment_and_no_table(ray: Engine, ray_hosts: RayHosts) -> None:
    ray.script(STEPS)
    process = ray.start(on_ray("-w", "1", "--name", "secret", "train.py"))
    ray.lives("worker-0", 1, process)
    token = msgspec.json.decode((ray.folder / "runs" / "secret" / "job.json").read_bytes())["token"]
    assert (ray.folder / "runs" / "secret").stat().st_mode & 0o777 == 0o700
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            try:
                data = (entry / name).read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            found += [f"{entry.name}/{name}"] if token.encode() in data else []
    for table in TABLES:
        with urllib.request.urlopen(f"{ray_hosts.dashboard}/{table}", timeout=PATIENCE) as reply:
            data = reply.read()
        assert b"Holder" in data or "actors" not in table, data
        found += [table] if token.encode() in data else []
    ray.end_steps()
    code, output = ray.finish(process)
    assert code == 0 and found == [] and token not in output


def test_a_killed_worker_and_a_killed_server_come_back(ray: Engine) -> None:
    """Two servers with two replicas, spread over hosts: nothing that was acknowledged is lost, and no sample counts
    twice.
    """
    ray.settings(SPREAD)
    ray.script(COUNTS)
    words = ["-w", "2", "-s", "2", "--replicas", "2", "--policy", "async", "--name", "kill", "train.py"]
    process = ray.start(on_ray(*words))
    pid = int(ray.lives("worker-1", 1, process)[0][0])
    ray.goes_on("worker-1")
    before = ray.counted()
    os.kill(pid, signal.SIGKILL)
    ray.comes_back("worker-1", before, process)
    (server,) = ray.members("server-1")
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: [pid for pid in ray.members("server-1") if pid != server] != [], "no server came back")
    for name in ("worker-0", "worker-1"):
        ray.goes_on(name)
    ray.end_steps()
    code, output = ray.finish(process)
    assert code == 0 and finished_well(output, 2), output
    assert "worker-1 was killed by SIGKILL" in output and "server-1 was killed by SIGKILL" in output, output
    counted_once(output)
    ray.check_nothing_left()


def test_a_function_runs_in_every_worker(ray: Engine) -> None:
    """Of the program's own file, whose other lines do not run again."""
    script = ray.script("""
        import sys
        import numpy as np, syncline, syncline.ray

        def train(times, word):
            job = syncline.init()
            job.kv.register({"x": np.zeros(3)}, syncline.Rule("SGD", lr=1.0))
            for _ in range(times):
                job.kv.push({"x": np.ones(3)}).wait()
            job.barrier("done")
            if word == "fail":
                raise ValueError("a mistake of the function")
            print(f"{word} {job.name} of {job.world_size}: {job.kv.pull()['x']}", flush=True)

        if __name__ == "__main__":
            common = dict(workers=2, servers=1, page="off", max_restarts=0)
            print("NAME", syncline.ray.run(train, name="one", arguments={"times": 5, "word": "HERE"}, **common))
            try:
                syncline.ray.run(lambda: None, **common)
            except syncline.ConfigError as error:
                print("REFUSED", error)
            try:
                syncline.ray.run(train, name="two", arguments={"times": 1, "word": "fail"}, **common)
            except syncline.JobFailed as error:
                print("FAILED", error)
    """)
    code, output = ray.run(["python", script])
    assert code == 0 and "NAME one" in output, output
    assert "REFUSED " in output and "workers find the function by its name" in output, output
    assert "ValueError: a mistake of the function" in output, output
    assert "FAILED the job two has failed, with exit code 1" in output, output
    for rank in range(2):
        assert f"HERE worker-{rank} of 2: [-5. -5. -5.]" in output, output
    ray.check_nothing_left()


def test_a_host_that_cannot_start_members_is_named(ray: Engine) -> None:
    """As one without syncline: it would be the same again, so nobody waits for it."""
    without = ray.folder / "without"
    without.mkdir()
    (without / "sitecustomize.py").write_text('import sys\nsys.modules["syncline"] = None\n')
    script = ray.script(f"""
        import syncline, syncline.ray

        def train():
            syncline.init()

        if __name__ == "__main__":
            import ray
            ray.init(runtime_env={{"env_vars": {{"PYTHONPATH": {str(without)!r}}}}}, log_to_driver=False)
            try:
                syncline.ray.run(train, page="off", max_restarts=0)
            except syncline.JobFailed as error:
                print("FAILED", error)
    """)
    code, output = ray.run(["python", script])
    assert code == 0 and "FAILED" in output, output
    assert re.search(r"(server|worker)-0 cannot be started on Ray: ModuleNotFoundError: .*syncline", output), output
    ray.check_nothing_left()


def test_what_is_wrong_is_named_at_the_start(ray: Engine) -> None:
    script = ray.script(SUMS)
    for words, said in (
        (["-w", "64"], r"64 workers and 1 server need 65 CPUs; the Ray cluster has 12 CPUs on 3 hosts; use smaller"),
        (["--cpus-per-worker", "5"], r"no host of the Ray cluster has 5 CPUs, which a worker needs"),
        (["--gpus-per-worker", "1"], r"no host of the Ray cluster has 1 CPU and 1 GPU, which a worker needs"),
        (
            ["-w", "64", "--queue-seconds", "1"],
            r"not start within 1 s: it waits for 65 CPUs; free are 1\d CPUs",
        ),
        (["-H", "a:1"], r"Ray chooses the hosts; leave out -H"),
        (["--detach"], r"ray job submit --no-wait"),
    ):
        code, output = ray.run(on_ray(*words, script))
        assert code == 2 and re.search(said, output), output
        assert "Traceback" not in output
    code, output = ray.run(on_ray(script), {"RAY_ADDRESS": "127.0.0.1:9"})
    assert code == 2 and "RAY_ADDRESS=127.0.0.1:9: no Ray cluster is there: " in output, output
    code, output = ray.run(on_ray(script), {"RAY_ADDRESS": "ray://127.0.0.1:9"})
    assert code == 2 and "a launcher cannot run outside of the cluster; use ray job submit" in output, output


def test_hosts_that_do_not_see_the_folder_get_a_copy(ray: Engine) -> None:
    """The launcher is in a mount namespace, where its folder is a disk of its own."""
    ray.script(SUMS)
    run = "syncline run --on ray --page off -w 2 -s 1 train.py"
    inside = f"mkdir own && mount -t tmpfs none own && cp train.py syncline.toml own && cd own && {run}"
    if os.geteuid() != 0:
        pytest.skip("only root can make a mount namespace")
    code, output = ray.run(["unshare", "-m", "sh", "-c", inside])
    assert code == 0, output
    sums_of(output, 2)
    ray.check_nothing_left()


def test_without_ray_the_extra_is_named(engine: Engine) -> None:
    code, output = engine.run([f"{BIN}/syncline", "run", "--on", "ray", engine.script(SUMS)])
    if subprocess.run([sys.executable, "-c", "import ray"], capture_output=True).returncode == 0:
        pytest.skip("this environment has Ray")
    assert code == 2 and "--on ray needs Ray: pip install 'syncline[ray]'" in output, output
