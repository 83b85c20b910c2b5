"""Figures of jobs on engines: `make test-engines ARGS="-m figures -rP"` prints them. What is exact is asserted."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

import pytest
from tests.engines.clusters import Cluster, wait_until
from tests.engines.conftest import BIN, STEPS, Engine, finished_well, mpirun, two_ranks
from tests.engines.rays import LOOPBACK, RAY_BIN, RayHosts, on_ray
from tests.engines.test_ranks import DIES, SOON

pytestmark = [pytest.mark.engines, pytest.mark.figures]

ROOT = pathlib.Path(__file__).parents[2]
TIMES = 3

#: What Ray does for a job without us: room for three members, an actor in each. Each leaves a file.
ACTORS = """
    import pathlib, sys, ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Strategy
    folder = str(pathlib.Path.cwd())
    ray.init(address="auto", runtime_env={"working_dir": folder}, log_to_driver=False)
    group = placement_group([{"CPU": 1}] * 3)
    ray.get(group.ready())

    @ray.remote(num_cpus=1)
    class Member:
        def begin(self, name):
            pathlib.Path(folder, name).touch()

    members = [Member.options(scheduling_strategy=Strategy(group, k)).remote() for k in range(3)]
    ray.get([member.begin.remote(f"began-{k}") for k, member in enumerate(members)])
"""


def seconds_until(engine: Engine, words: Sequence[str], names: Sequence[str]) -> tuple[float, subprocess.Popen[str]]:
    for name in names:
        (engine.folder / name).unlink(missing_ok=True)
    begun = time.monotonic()
    process = engine.start(words)
    wait_until(lambda: all((engine.folder / name).exists() for name in names) or process.poll(), "nothing has begun")
    took = time.monotonic() - begun
    assert process.poll() in (None, 0), engine.finish(process)[1]
    return took, process


def compare_starts(engine: Engine, own: Sequence[str], job: Sequence[str], began: Sequence[str], title: str) -> None:
    """The engine's own start of processes, and a job's first acknowledged step, in turns."""
    starts, steps = [], []
    engine.settings(engine.said)
    for number in range(TIMES):
        took, process = seconds_until(engine, own, began)
        starts.append(took)
        engine.finish(process)
        engine.script(STEPS)
        (engine.folder / "end").unlink(missing_ok=True)
        words = [*job, "--name", f"job-{number}", "train.py"]
        took, process = seconds_until(engine, words, ["at-worker-0", "at-worker-1"])
        steps.append(took)
        engine.end_steps()
        assert engine.finish(process)[0] == 0
    beyond = statistics.median(step - start for step, start in zip(steps, starts, strict=True))
    print(
        f"\n{title}: from submission to the first step {statistics.median(steps):.1f} s; the engine's own start of "
        f"processes {statistics.median(starts):.1f} s; beyond it {beyond:.1f} s (medians of {TIMES})"
    )


def test_figures_of_the_first_step_on_slurm(slurm: Engine) -> None:
    own = ["srun", "-N2", "-n2", "sh", "-c", "touch began-$SLURM_PROCID"]
    job = ["srun", "-N2", "-n2", "syncline", "run", "--page", "off"]
    compare_starts(slurm, own, job, ["began-0", "began-1"], "Slurm, srun")


def test_figures_of_the_first_step_of_a_batch_job_on_slurm(slurm: Engine) -> None:
    (slurm.folder / "own.sh").write_text("#!/bin/sh\n#SBATCH -N2 --ntasks-per-node=1\nsrun touch began-0\n")
    job = ["syncline", "run", "--on", "slurm", "--nodes", "2", "--page", "off"]
    compare_starts(slurm, ["sbatch", "--wait", "own.sh"], job, ["began-0"], "Slurm, --on slurm")


def test_figures_of_the_first_step_on_ray(ray: Engine) -> None:
    ray.script(ACTORS)
    (ray.folder / "train.py").rename(ray.folder / "actors.py")
    began = [f"began-{k}" for k in range(3)]
    compare_starts(ray, ["python", "actors.py"], on_ray("-w", "2", "-s", "1"), began, "Ray")


#: Of every member, wherever it runs: sums in another order would round otherwise.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def compare_accuracy(engine: Engine, there: Sequence[str], title: str) -> None:
    """LeNet after one epoch, `sync`, two workers and one server: on one host, and on two. Equal to the last bit."""
    torch = pytest.importorskip("torch")
    example = [str(ROOT / "examples" / "fashion_mnist.py"), "--epochs", "1", "--out"]
    found, models = [], []
    for number, words in enumerate((["syncline", "run", "-w", "2", "-s", "1"], there)):
        out = engine.folder / f"model-{number}.pt"
        code, output = engine.run([*words, *example, str(out)], ONE_THREAD)
        assert code == 0 and finished_well(output, 2), output
        found += re.findall(r"accuracy\s+(\S+)", output)
        models.append(torch.load(out, weights_only=True))
    assert len(found) == 2 and found[0] == found[1], found
    one, two = models
    assert one.keys() == two.keys() and [name for name in one if not torch.equal(one[name], two[name])] == []
    print(f"\n{title}: accuracy {found[1]} on two hosts, {found[0]} on one; the parameters are equal")


def test_figures_of_accuracy_on_two_nodes_of_slurm(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    made = Engine(tmp_path.resolve(), {**cluster.environment, "PATH": f"{BIN}:{cluster.environment['PATH']}"})
    made.settings('bind = "127.0.0.1"')
    try:
        compare_accuracy(made, ["srun", "-N2", "-n2", "syncline", "run", "-s", "1"], "Slurm")
    finally:
        cluster.cancel_all()
        made.close()


def test_figures_of_accuracy_on_two_hosts_of_ray(tmp_path: pathlib.Path) -> None:
    """With torch from the environment of these tests, behind all else: the one that has Ray has none. Ray would tell
    each worker to compute with three threads, for its three CPUs."""
    torch = pytest.importorskip("torch")
    folder = tmp_path.resolve() / "with"
    folder.mkdir()
    place = pathlib.Path(torch.__file__).parents[1]
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(place)!r})\n")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    hosts = RayHosts(PYTHONPATH=path, **ONE_THREAD)
    own = {"PATH": f"{RAY_BIN}:{os.environ['PATH']}", "RAY_ADDRESS": hosts.address, "PYTHONPATH": path, **LOOPBACK}
    made = Engine(tmp_path.resolve(), own)
    try:
        compare_accuracy(made, on_ray("-w", "2", "-s", "1", "--cpus-per-worker", "3"), "Ray")
    finally:
        made.close()
        hosts.close()


def until_gone(engine: Engine, cancel: Callable[[], object], title: str, *, saves: bool = True) -> None:
    begun = time.monotonic()
    cancel()
    engine.check_nothing_left()
    took = time.monotonic() - begun
    if saves:
        assert list((engine.folder / "saves").glob("*/manifest.json")), "nothing was saved"
    print(f"\n{title}: everything gone after {took:.1f} s{', saved' if saves else ''}")


def test_figures_of_scancel(slurm: Engine, cluster: Cluster) -> None:
    slurm.script(STEPS)
    words = ["syncline", "run", "--on", "slurm", "--nodes", "2", "-s", "2", "--checkpoint", "saves", "--page", "off"]
    process = slurm.start([*words, "train.py"])
    slurm.lives("worker-1", 1, process)
    slurm.goes_on("worker-0")
    (job,) = cluster.say("squeue", "-h", "-o", "%i").split()
    until_gone(slurm, lambda: (cluster.say("scancel", job), slurm.finish(process)), "scancel")


def test_figures_of_ray_job_stop(ray: Engine, ray_hosts: RayHosts) -> None:
    ray.script(STEPS)
    submit = ["ray", "job", "submit", "--address", ray_hosts.dashboard, "--submission-id", "figures", "--"]
    words = on_ray("-w", "2", "-s", "2", "--checkpoint", "saves", "train.py")
    process = ray.start([*submit, "env", "-C", str(ray.folder), *words])
    ray.lives("worker-1", 1, process)
    ray.goes_on("worker-0")
    took = []

    def stop() -> None:
        begun = time.monotonic()
        ray.run(["ray", "job", "stop", "--address", ray_hosts.dashboard, "--no-wait", "figures"])
        took.append(time.monotonic() - begun)
        ray.finish(process)

    until_gone(ray, stop, "ray job stop")
    print(f"of this, the command ray job stop itself {took[0]:.1f} s")


@pytest.mark.parametrize("kind", ["mpirun.openmpi", "mpiexec.hydra"])
def test_figures_of_ctrl_c_of_mpirun(engine: Engine, kind: str) -> None:
    engine.leave_out_torch()
    engine.script(STEPS)
    command = mpirun(kind, 2, "syncline", "worker-env", "--checkpoint", "saves", "python", "train.py")
    process = engine.start(command)
    engine.lives("worker-1", 1, process)
    engine.goes_on("worker-0")

    def interrupt() -> None:
        process.send_signal(signal.SIGINT)
        engine.finish(process)

    until_gone(engine, interrupt, f"Ctrl-C of {kind}")


@pytest.mark.parametrize("kind", ["mpirun.openmpi", "mpiexec.hydra", "torchrun"])
def test_figures_of_the_death_of_a_rank(engine: Engine, kind: str) -> None:
    words = ["syncline", "worker-env", "--checkpoint", "saves", "--save-every", "5steps"]
    engine.script(DIES)
    engine.settings(SOON)
    if kind != "torchrun":
        engine.leave_out_torch()
    command = two_ranks(kind, *words, "python", "train.py")
    process = engine.start(command)
    pid = int(engine.wait_for("pid-worker-1", process))
    engine.wait_for_save("saves", process)

    def kill() -> None:
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
        code, output = engine.finish(process)
        assert code != 0 and re.search(r"rank 1\b|rank +: 1\b", output), output

    until_gone(engine, kill, f"{kind}: the death of a rank")
    code, output = engine.run(command)
    assert code == 0 and finished_well(output, 2), output
    begins = [int(begin) for begin in re.findall(r"worker-[01] began at (-?\d+)", output)]
    assert len(begins) == 2 and max(begins) <= -5, output
