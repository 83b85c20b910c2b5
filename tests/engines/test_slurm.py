"""Jobs on a real Slurm of four nodes: srun's tasks, batch jobs, deaths, lost nodes, limits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence

import pytest
from tests.engines.clusters import Cluster, wait_until
from tests.engines.conftest import COUNTS, SPREAD, STEPS, Engine, counted_once, finished_well
from tests.engines.test_ranks import SUMS, sums_of

pytestmark = pytest.mark.engines


def batch(*words: str) -> Sequence[str]:
    return ["syncline", "run", "--on", "slurm", *words]


@pytest.mark.smoke
def test_every_task_of_srun_is_a_worker_of_one_job(slurm: Engine) -> None:
    """Two tasks on each of two nodes; the folders with secrets are their user's own, and nothing stays."""
    script = slurm.script(
        SUMS + "    import os, stat\n    print('MODE', oct(os.stat('runs/sums').st_mode & 0o777))\n"
    )
    words = ["srun", "-N2", "-n4", "--overcommit", "syncline", "run", "--name", "sums", script]
    code, output = slurm.run(words)
    assert code == 0, output
    sums_of(output, 4)
    assert "4 workers and 1 server on Slurm job" in output and ": n1, n2" in output, output
    assert "MODE 0o700" in output
    slurm.check_nothing_left()
    assert list((slurm.folder / "runs").glob(".slurm*")) == []


def test_a_plain_script_of_srun_joins_too(slurm: Engine) -> None:
    code, output = slurm.run(["srun", "-N1", "-n2", "--overcommit", "python", slurm.script(SUMS)])
    assert code == 0, output
    sums_of(output, 2)
    slurm.check_nothing_left()


def test_a_batch_job_is_followed_to_its_end(slurm: Engine) -> None:
    code, output = slurm.run(batch("--nodes", "2", "-s", "2", "--name", "b", "--time", "5", slurm.script(SUMS)))
    assert code == 0 and re.search(r"b is Slurm job \d+; its output is ", output), output
    sums_of(output, 2)
    assert (slurm.folder / "runs" / "b").stat().st_mode & 0o777 == 0o700
    assert "token" not in (slurm.folder / "runs" / "b" / "job.sh").read_text()
    slurm.check_nothing_left()


#: Which GPU of which node each worker has. `torch` counts those that Slurm lets it see: this machine has none.
GPUS = """
    import os, sys
    import syncline
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    if COUNTS:
        sys.modules.pop("torch")  # is left out of other tests
        import torch
        torch.cuda.device_count = lambda: len(visible)
    job = syncline.init()
    kind, number = str(job.device).split(":")
    print("GPU", kind, os.environ["SLURMD_NODENAME"], visible[int(number)], flush=True)
"""


@pytest.mark.parametrize("way", ["srun", "a task each", "--on slurm"])
def test_every_worker_has_a_gpu_of_its_own(slurm: Engine, way: str) -> None:
    """On two nodes with two GPUs each. Slurm shows them to all tasks of a node, or to each task its own."""
    slurm.script(GPUS.replace("COUNTS", str(way != "a task each")))
    words = {
        "srun": ["srun", "-N2", "-n4", "--ntasks-per-node=2", "--gpus-per-node=2", "syncline", "run", "train.py"],
        "a task each": ["srun", "-N2", "-n4", "--gpus-per-task=1", "syncline", "run", "train.py"],
        "--on slurm": batch("--nodes", "2", "--gpus-per-node", "2", "train.py"),
    }[way]
    code, output = slurm.run(words)
    assert code == 0 and finished_well(output, 4), output
    found = sorted(re.findall(r"GPU (\w+) (n\d) (\d)", output))
    nodes = sorted({node for _, node, _ in found})
    assert len(nodes) == 2 and found == [("cuda", node, number) for node in nodes for number in "01"], output
    slurm.check_nothing_left()


def of_counts(slurm: Engine) -> None:
    """A script that counts its samples, and settings by which every server has a part of the counts."""
    slurm.settings(f'bind = "127.0.0.1"\n{SPREAD}')
    slurm.script(COUNTS)


def test_a_killed_worker_and_a_killed_server_come_back(slurm: Engine) -> None:
    """Two servers with two replicas: nothing that was acknowledged is lost, and no sample counts twice."""
    of_counts(slurm)
    words = ["-s", "2", "--replicas", "2", "--policy", "async", "--name", "kill", "train.py"]
    process = slurm.start(["srun", "-N2", "-n2", "syncline", "run", *words])
    pid = int(slurm.lives("worker-1", 1, process)[0][0])
    slurm.goes_on("worker-1")
    slurm.check_secrets()
    before = slurm.counted()
    os.kill(pid, signal.SIGKILL)
    slurm.comes_back("worker-1", before, process)
    (server,) = slurm.members("server-1")
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: [pid for pid in slurm.members("server-1") if pid != server] != [], "no server came back")
    for name in ("worker-0", "worker-1"):
        slurm.goes_on(name)
    slurm.end_steps()
    code, output = slurm.finish(process)
    assert code == 0 and finished_well(output, 2), output
    assert "worker-1 was killed by SIGKILL" in output and "server-1 was killed by SIGKILL" in output, output
    counted_once(output)
    slurm.check_nothing_left()


def test_the_loss_of_a_node_is_a_death_and_its_members_start_elsewhere(slurm: Engine, cluster: Cluster) -> None:
    """A worker and a server are lost with it. What was acknowledged is not, and no sample counts twice."""
    of_counts(slurm)
    words = ["--nodes", "3", "-w", "3", "-s", "3", "--replicas", "2", "--policy", "async", "--name", "loss"]
    process = slurm.start(batch(*words, "train.py"))
    for name in ("worker-0", "worker-1", "worker-2"):
        slurm.lives(name, 1, process)
    first = slurm.lives("worker-0", 1, process)[0][1]
    lost = slurm.lives("worker-2", 1, process)[0][1]
    assert lost != first
    slurm.goes_on("worker-2")
    before = slurm.counted()
    cluster.lose(lost)
    try:
        again = slurm.comes_back("worker-2", before, process)
        assert again[1] != lost
        slurm.end_steps()
        code, output = slurm.finish(process)
        assert code == 0 and finished_well(output, 3), output
        assert f"on {lost} is lost" in output, output
        counted_once(output)
    finally:
        cluster.start_node(lost)
        cluster.wait_for_nodes()


def test_a_job_grows_and_shrinks_in_its_allocation(slurm: Engine) -> None:
    """Meanwhile every sample of every epoch counts once."""
    slurm.script(COUNTS)
    words = ["srun", "-N2", "-n2", "syncline", "run", "-w", "1:4", "--policy", "async", "--name", "grow", "train.py"]
    process = slurm.start(words)
    slurm.lives("worker-0", 1, process)
    code, said = slurm.run(["syncline", "scale", "grow", "--workers", "4"])
    assert code == 0, said
    places = [slurm.lives(f"worker-{k}", 1, process)[0][1] for k in range(4)]
    assert len(set(places)) == 2, places
    slurm.goes_on("worker-3")
    code, said = slurm.run(["syncline", "scale", "grow", "--workers", "2"])
    assert code == 0, said
    wait_until(lambda: slurm.num_workers() == 2, "none has left")
    slurm.end_steps()
    code, output = slurm.finish(process)
    assert code == 0 and "the job has finished" in output, output
    counted_once(output)
    slurm.check_nothing_left()


def test_the_loss_of_the_first_node_requeues_the_job_which_goes_on(slurm: Engine, cluster: Cluster) -> None:
    """With it the launcher and the coordinator are gone: what was saved counts, and no sample of it counts again."""
    of_counts(slurm)
    words = ["--nodes", "2", "--checkpoint", "saves", "--save-every", "5steps", "--requeue", "--name", "first"]
    process = slurm.start(batch(*words, "--policy", "async", "train.py"))
    first = slurm.lives("worker-0", 1, process)[0][1]
    slurm.wait_for_save("saves", process)
    (job,) = cluster.say("squeue", "-h", "-o", "%i").split()
    cluster.lose(first)
    try:
        wait_until(lambda: cluster.state(job) == "PENDING", f"job {job} was not requeued")
        cluster.start_soon(job)
        again = slurm.lives("worker-0", 2, process)[-1]
        assert float(again[2]) < 0, "it began again"
        slurm.goes_on("worker-0")  # into the epoch that was not over: the one before it has no samples left
        slurm.end_steps()
        code, output = slurm.finish(process)
        assert code == 0 and finished_well(output, 2), output
        counted_once(output)
        assert f"the first node of job {job} is lost; the job is requeued" in output, output
    finally:
        cluster.start_node(first)
        cluster.wait_for_nodes()


def test_the_doctor_looks_at_the_cluster(slurm: Engine) -> None:
    code, output = slurm.run(["syncline", "doctor", "--on", "slurm"])
    words = " ".join(output.split())
    assert code == 0 and re.search(r"the cluster ok main\*: 4 nodes, up", words), output


def test_a_cancelled_job_is_saved_and_gone(slurm: Engine, cluster: Cluster) -> None:
    slurm.script(STEPS)
    words = ["--nodes", "2", "--checkpoint", "saves", "--requeue", "--name", "cancel", "--time", "10", "train.py"]
    process = slurm.start(batch(*words))
    slurm.lives("worker-1", 1, process)
    slurm.goes_on("worker-1")
    (job,) = cluster.say("squeue", "-h", "-o", "%i").split()
    cluster.say("scancel", job)
    code, output = slurm.finish(process)
    assert code != 0 and "CANCELLED" in output, output
    assert list((slurm.folder / "saves").glob("*/manifest.json")), output
    slurm.check_nothing_left()
    assert cluster.say("squeue", "-h", "-o", "%i").split() == []


def test_before_the_time_limit_a_job_is_saved_and_requeued_and_goes_on(slurm: Engine, cluster: Cluster) -> None:
    """SIGTERM as Slurm sends it before the limit, by its own command; the limit itself would take minutes. All that
    was acknowledged is saved, and no sample of it counts again.
    """
    of_counts(slurm)
    words = ["--nodes", "2", "--checkpoint", "saves", "--requeue", "--name", "again", "--time", "10", "train.py"]
    process = slurm.start(batch("--policy", "async", *words))
    slurm.lives("worker-1", 1, process)
    slurm.goes_on("worker-1")
    before = slurm.counted()
    (job,) = cluster.say("squeue", "-h", "-o", "%i").split()
    shown = cluster.say("scontrol", "show", "job", "--details", job)
    assert f"JobId={job}" in shown
    slurm.check_secrets(shown, cluster.say("scontrol", "write", "batch_script", job, "-"))
    cluster.say("scancel", "--signal=TERM", job)
    wait_until(lambda: cluster.state(job) == "PENDING", f"job {job} was not requeued")
    assert list((slurm.folder / "saves").glob("*/manifest.json"))
    cluster.start_soon(job)
    begins = [-float(life[2]) for life in slurm.lives("worker-1", 2, process)]
    assert begins[1] >= before > 0, begins
    slurm.end_steps()
    code, output = slurm.finish(process)
    assert code == 0 and finished_well(output, 2), output
    counted_once(output)
    assert "saved step-" in output or "saved " in output
    slurm.check_nothing_left()


def test_what_the_cluster_does_not_have_is_named_at_once(slurm: Engine) -> None:
    script = slurm.script(SUMS)
    for words, said in (
        (["--nodes", "9"], r"Slurm does not take the job: .*[Nn]ode|will not start job \d+: PartitionNodeLimit"),
        (["--nodes", "1", "--gpus-per-node", "8"], r"Slurm does not take the job: .*node configuration"),
        (["--nodes", "1", "--partition", "nowhere"], r"Slurm does not take the job: .*partition"),
        (["--nodes", "1", "--partition", "short", "--time", "50"], r"PartitionTimeLimit|time limit"),
        (["--nodes", "1", "--requeue"], r"--requeue goes on from a checkpoint: add --checkpoint DIR"),
        (["--nodes", "1", "-H", "a:1"], r"Slurm chooses the hosts; use --nodes"),
    ):
        code, output = slurm.run(batch(*words, script))
        assert code == 2 and re.search(said, output), output
        assert "Traceback" not in output


def test_a_controller_that_is_not_there_is_named(slurm: Engine, cluster: Cluster) -> None:
    conf = (cluster.folder / "slurm.conf").read_text()
    (slurm.folder / "slurm.conf").write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", conf))
    away = {"SLURM_CONF": str(slurm.folder / "slurm.conf")}
    code, output = slurm.run(batch("--nodes", "1", slurm.script(SUMS)), away)
    assert code == 2 and "Slurm does not take the job: " in output and "Unable to contact" in output, output
    assert "Traceback" not in output


def test_a_node_with_another_version_is_named_at_the_start(slurm: Engine) -> None:
    """A python of its own says that it is another one. The job does not begin, and does not wait for a deadline."""
    other = slurm.folder / "other"
    other.mkdir()
    lines = ("import platform, sys", "sys.modules['torch'] = None", "platform.python_version = lambda: '3.9.18'")
    (other / "sitecustomize.py").write_text("\n".join(lines))
    words = f"[ $SLURM_PROCID = 1 ] && export PYTHONPATH={other}:$PYTHONPATH; exec syncline run {slurm.script(SUMS)}"
    code, output = slurm.run(["srun", "-N2", "-n2", "sh", "-c", words])
    assert code != 0 and re.search(r"host n\d has Python 3\.9\.18, this host 3\.", output), output
    assert "worker-1 of 2" not in output, output
    slurm.check_nothing_left()


def test_a_job_that_stays_in_the_queue_says_what_it_waits_for(slurm: Engine, cluster: Cluster) -> None:
    script = slurm.script(SUMS)
    blocking = slurm.start(["srun", "-N4", "--exclusive", "sleep", "600"])
    wait_until(lambda: cluster.say("squeue", "-h", "-o", "%T").split() == ["RUNNING"], "the first job does not run")
    code, output = slurm.run(batch("--nodes", "4", "--queue-seconds", "3", script))
    blocking.terminate()
    assert code == 2 and re.search(r"did not start within 3 s: it waits for (Resources|Priority)", output), output


def test_tasks_without_a_common_folder_say_so(slurm: Engine) -> None:
    """Each task goes to a folder of its own first."""
    slurm.settings("start_seconds = 3.0")
    slurm.script(SUMS)
    place = "mkdir -p own-$SLURM_PROCID && cp train.py syncline.toml own-$SLURM_PROCID && cd own-$SLURM_PROCID && "
    code, output = slurm.run(["srun", "-N2", "-n2", "sh", "-c", f"{place} syncline run --bind 127.0.0.1 train.py"])
    assert code != 0, output
    assert re.search(r"task 1 on n\d finds no .*/own-1/runs/.*is the working folder on a disk that all", output), (
        output
    )
    assert re.search(r"agents did not come within 3 s: 1 of n", output), output
    assert "Traceback" not in output


def test_64_workers_on_four_nodes(slurm: Engine) -> None:
    code, output = slurm.run(
        ["srun", "-N4", "-n64", "--overcommit", "syncline", "run", "-s", "2", slurm.script(SUMS)]
    )
    assert code == 0 and finished_well(output, 64), output
    slurm.check_nothing_left()
