"""mpirun and torchrun start the workers; rank 0 starts the rest. Real launchers, on loopback."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import time
import urllib.error
import urllib.request

import pytest
from tests.engines.conftest import STEPS, Engine, finished_well, mpirun, torchrun, two_ranks
from tests.patience import PATIENCE

pytestmark = pytest.mark.engines

#: Each rank adds 1 in every step: in sync the sum is the mean, so every step takes 1 away.
SUMS = """
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(3)}, syncline.Rule("SGD", lr=1.0))
    for _ in range(5):
        job.kv.push({"x": np.ones(3)}).wait()
    job.barrier("done")
    print(f"{job.name} of {job.world_size}: {job.kv.pull()['x']}", flush=True)
"""
#: Says its process id and steps on until its death, so that saves can end; started again, it makes ten more steps.
DIES = """
    import os, pathlib, time
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(3)}, syncline.Rule("SGD", lr=1.0))
    first, begin = not pathlib.Path(f"pid-{job.name}").exists(), job.kv.pull()["x"][0]
    for step in range(10**9 if first else 10):
        job.kv.push({"x": np.ones(3)}).wait()
        if first:
            time.sleep(0.01)
        if first and step == 9:
            job.barrier("pids")
            pathlib.Path(f".pid-{job.name}").write_text(str(os.getpid()))
            os.rename(f".pid-{job.name}", f"pid-{job.name}")
    job.barrier("done")
    print(f"{job.name} began at {begin:g} and ends at {job.kv.pull()['x'][0]:g}", flush=True)
"""

#: The death of a rank is seen at once, as in a job without settings.
SOON = "suspect_seconds = 0.3"


def sums_of(output: str, ranks: int) -> None:
    for rank in range(ranks):
        assert f"worker-{rank} of {ranks}: [-5. -5. -5.]" in output, output
    assert finished_well(output, ranks), output


def sums_are_right(output: str, ranks: int) -> None:
    sums_of(output, ranks)
    assert output.count("the death of any rank ends the job: ") == 1, output


def test_ranks_join_a_job_that_was_started_by_hand(engine: Engine) -> None:
    """`SYNCLINE_JOB` names its job file; rank 0 starts no coordinator and no server then."""
    engine.leave_out_torch()
    script, file = engine.script(SUMS), "job.json"
    roles = [engine.start(["syncline", "coordinator", "--job", file, "-w", "2"])]
    engine.wait_for(file, *roles)
    roles.append(engine.start(["syncline", "server", "--job", file]))
    command = mpirun("mpirun.openmpi", 2, "python", script)
    code, output = engine.run(command, {"SYNCLINE_JOB": str(engine.folder / file)})
    ends = [engine.finish(role) for role in roles]
    assert code == 0 and [end for end, _ in ends] == [0, 0], (output, ends)
    for rank in range(2):
        assert f"worker-{rank} of 2: [-5. -5. -5.]" in output, output
    assert "beside rank 0" not in output, output
    engine.check_nothing_left()


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["mpirun.openmpi", "mpiexec.hydra"])
def test_every_rank_of_mpi_is_a_worker_of_one_job(engine: Engine, kind: str) -> None:
    engine.leave_out_torch()
    code, output = engine.run(mpirun(kind, 2, "python", engine.script(SUMS)))
    assert code == 0, output
    sums_are_right(output, 2)
    engine.check_nothing_left()


@pytest.mark.smoke
def test_every_rank_of_torchrun_is_a_worker_of_one_job(engine: Engine) -> None:
    code, output = engine.run(torchrun("--standalone", "--nproc-per-node", "2", engine.script(SUMS)))
    assert code == 0, output
    sums_are_right(output, 2)
    engine.check_nothing_left()


@pytest.mark.parametrize("kind", ["mpirun.openmpi", "mpiexec.hydra", "torchrun"])
def test_a_job_of_ranks_has_a_page(engine: Engine, kind: str) -> None:
    """Rank 0 prints the link, `syncline page` another one, each of which opens it once. The port that was said is
    free for the next start at once.
    """
    if kind != "torchrun":
        engine.leave_out_torch()
    engine.settings(f'name = "ranked"\npage = "{free_port()}"')
    engine.script(STEPS)
    process = engine.start(two_ranks(kind, "python", "train.py"))
    assert process.stdout is not None
    output = ""
    while (found := re.search(r"syncline: the page: (http://\S+)\n", output)) is None:
        line = process.stdout.readline()
        assert line, output
        output += line
    engine.lives("worker-1", 1, process)
    engine.goes_on("worker-1")
    engine.check_secrets()
    code, another = engine.run(["syncline", "page", "ranked"])
    assert code == 0 and another.strip() != found[1], another
    for link in (found[1], another.strip()):
        with urllib.request.urlopen(link, timeout=PATIENCE) as answer:
            assert answer.status == 200 and "syncline_" in answer.headers["Set-Cookie"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(link, timeout=PATIENCE)
    engine.end_steps()
    code, rest = engine.finish(process)
    assert code == 0 and finished_well(output + rest, 2), output + rest
    code, output = engine.run(two_ranks(kind, "python", engine.script(SUMS)))
    assert code == 0 and "syncline: the page: " in output, output
    engine.check_nothing_left()


@pytest.mark.parametrize("way", ["an option", "a variable", "a file"])
def test_a_job_of_ranks_does_without_a_page(engine: Engine, way: str) -> None:
    engine.leave_out_torch()
    engine.settings('name = "ranked"' + ('\npage = "off"' if way == "a file" else ""))
    engine.script(STEPS)
    words = ["syncline", "worker-env", "--page", "off"] if way == "an option" else []
    environment = {"SYNCLINE_SETTINGS": '{"page": "off"}'} if way == "a variable" else {}
    process = engine.start(mpirun("mpiexec.hydra", 2, *words, "python", "train.py"), environment)
    engine.lives("worker-1", 1, process)
    code, output = engine.run(["syncline", "page", "ranked"])
    assert code == 2 and "the job ranked has no page: it runs with --page off" in output, output
    assert not (engine.folder / "runs/ranked/page.token").exists()
    engine.end_steps()
    code, output = engine.finish(process)
    assert code == 0 and "the page:" not in output and finished_well(output, 2), output
    engine.check_nothing_left()


def test_rank_0_tells_what_makes_the_job_slow(engine: Engine) -> None:
    engine.leave_out_torch()
    engine.settings('name = "ranked"')
    engine.script(STEPS.replace("time.sleep(0.02)", 'time.sleep(0.4 if job.name == "worker-1" else 0.02)'))
    process = engine.start(mpirun("mpiexec.hydra", 2, "python", "train.py"))
    assert process.stdout is not None
    output = ""
    while "worker-1 is the straggler" not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    assert re.search(r"^syncline: worker-1 is the straggler: .*; the cause is compute: see what else", output, re.M)
    engine.end_steps()
    code, rest = engine.finish(process)
    assert code == 0 and "is the straggler" not in rest, rest
    engine.check_nothing_left()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_a_ring_has_its_servers_in_the_ranks(engine: Engine) -> None:
    engine.leave_out_torch()
    engine.settings('exchange = "ring"')
    code, output = engine.run(mpirun("mpirun.openmpi", 2, "python", engine.script(SUMS)))
    assert code == 0 and "2 workers of mpirun as a ring" in output, output
    sums_are_right(output, 2)
    engine.check_nothing_left()


@pytest.mark.parametrize("kind", ["mpirun.openmpi", "mpiexec.hydra", "torchrun"])
def test_the_death_of_a_rank_ends_the_job_and_the_same_command_goes_on(engine: Engine, kind: str) -> None:
    """With the options of worker-env. The death comes after a whole save, or there would be nothing to go on from. No
    command line and no environment has the secret.
    """
    words = ["syncline", "worker-env", "-s", "2", "--checkpoint", "saves", "--save-every", "5steps"]
    if kind != "torchrun":  # which is torch's
        engine.leave_out_torch()
    command = two_ranks(kind, *words, "python", engine.script(DIES))
    engine.settings(SOON)
    process = engine.start(command)
    pid = int(engine.wait_for("pid-worker-1", process))
    engine.wait_for_save("saves", process)
    engine.check_secrets()
    os.kill(pid, signal.SIGKILL)
    code, output = engine.finish(process)
    # Where the launcher ends the other ranks before they can say it, it names the rank itself.
    assert code != 0 and re.search(r"rank 1\b|rank +: 1\b", output), output
    engine.check_nothing_left()
    code, output = engine.run(command)
    assert code == 0 and finished_well(output, 2), output
    ends = re.findall(r"worker-[01] began at (-?\d+) and ends at (-\d+)", output)
    assert len(ends) == 2, output
    assert all(int(begin) <= -5 and int(end) == int(begin) - 10 for begin, end in ends), output


@pytest.mark.parametrize("has_token", [False, True], ids=["own token", "token file"])
def test_two_agents_of_torchrun_make_one_job_and_a_death_on_one_ends_both(engine: Engine, has_token: bool) -> None:
    """The agent of the other ranks does not see the death; its ranks hear of it from the job, by name."""
    token, environment = engine.folder / "token", {}
    if has_token:
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        environment = {"SYNCLINE_TOKEN_FILE": str(token)}
    engine.settings(SOON)
    port = str(20_000 + os.getpid() % 10_000)
    words = torchrun(
        "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--local-addr", "127.0.0.1", engine.script(DIES),
    )  # fmt: skip
    agents = [engine.start(words, environment) for _ in range(2)]
    pid = int(engine.wait_for("pid-worker-1", *agents))
    os.kill(pid, signal.SIGKILL)
    ends = [engine.finish(agent) for agent in agents]
    assert all(code != 0 for code, _ in ends), ends
    told = [output for _, output in ends if "the job has failed: worker-1 (rank 1) is gone; torchrun" in output]
    assert len(told) == 1, ends
    assert "the same command would go on from there" in told[0], ends
    engine.check_nothing_left()


def test_a_rank_that_fails_is_a_death_and_its_error_is_shown(engine: Engine) -> None:
    engine.leave_out_torch()
    script = engine.script("""
        import syncline
        job = syncline.init()
        job.barrier("all here")
        if job.name == "worker-1":
            raise ValueError("a mistake of the script")
        job.barrier("never")
    """)
    code, output = engine.run(mpirun("mpirun.openmpi", 2, "python", script))
    assert code != 0 and "ValueError: a mistake of the script" in output, output
    engine.check_nothing_left()


def test_a_rank_with_another_version_is_named_at_the_start(engine: Engine) -> None:
    """A python of its own says that it is another one. The job does not begin, and does not wait for a deadline."""
    engine.leave_out_torch()
    other = engine.folder / "other"
    other.mkdir()
    lines = ("import platform, sys", "sys.modules['torch'] = None", "platform.python_version = lambda: '3.9.18'")
    (other / "sitecustomize.py").write_text("\n".join(lines))
    script = engine.script(SUMS)
    command = f"[ $OMPI_COMM_WORLD_RANK = 1 ] && export PYTHONPATH={other}:$PYTHONPATH; exec python {script}"
    code, output = engine.run(mpirun("mpirun.openmpi", 2, "sh", "-c", command))
    assert code != 0 and "worker-1 has Python 3.9.18, worker-0 3." in output, output
    assert "worker-1 of 2" not in output, output
    engine.check_nothing_left()


def test_a_rank_that_hangs_is_evicted_and_ends_the_job_by_name(engine: Engine) -> None:
    """It is stopped, not dead: its launcher sees nothing. Its silence is noticed by its deadline."""
    engine.leave_out_torch()
    engine.settings("deadline_seconds = 20.0\nlongest_deadline_seconds = 25.0\nstuck_seconds = 600.0")
    engine.script(STEPS)
    process = engine.start(mpirun("mpirun.openmpi", 2, "python", "train.py"))
    pid = int(engine.lives("worker-1", 1, process)[0][0])
    engine.goes_on("worker-1")
    os.kill(pid, signal.SIGSTOP)
    code, output = engine.finish(process)
    assert code != 0 and "the job has failed: worker-1 (rank 1) is gone; all ranks end together" in output, output
    engine.check_nothing_left()


def test_torchrun_restarts_all_ranks_after_a_death_and_the_job_goes_on(engine: Engine) -> None:
    """Under the same name: the folder and the secret of the first start are given up in time."""
    words = ["syncline", "worker-env", "--checkpoint", "saves", "--save-every", "5steps", "--name", "again"]
    engine.script(DIES)
    engine.settings(SOON)
    arguments = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--no-python"]
    process = engine.start(torchrun(*arguments, *words, "python", "train.py"))
    pid = int(engine.wait_for("pid-worker-1", process))
    engine.wait_for_save("saves", process)
    os.kill(pid, signal.SIGKILL)
    code, output = engine.finish(process)
    assert code == 0 and finished_well(output, 2), output
    assert "torchrun restarts all ranks together, as often as its --max-restarts says" in output, output
    ends = re.findall(r"worker-[01] began at (-?\d+) and ends at (-\d+)", output)
    assert len(ends) == 2 and all(int(begin) <= -5 and int(end) == int(begin) - 10 for begin, end in ends), output
    engine.check_nothing_left()


def test_a_ctrl_c_that_comes_twice_saves_first(engine: Engine) -> None:
    """From the terminal, and from a launcher that passes it on as it is. The second one is no other wish."""
    engine.leave_out_torch()
    engine.script(STEPS)
    words = ["syncline", "worker-env", "--checkpoint", "saves", "--save-every", "1h", "python", "train.py"]
    process = engine.start(mpirun("mpiexec.hydra", 2, *words))
    pids = [int(engine.lives(name, 1, process)[0][0]) for name in ("worker-0", "worker-1")]
    engine.goes_on("worker-1")
    for pause in (0.1, 0.0):
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(pause)
    code, output = engine.finish(process)
    assert code != 0 and list((engine.folder / "saves").glob("*/manifest.json")), output
    engine.check_nothing_left()


def test_sigterm_to_torchrun_saves_first(engine: Engine) -> None:
    """Nothing else has saved it: with one save per hour there is none yet."""
    words = ["syncline", "worker-env", "--checkpoint", "saves", "--save-every", "1h"]
    engine.script(STEPS)
    process = engine.start(two_ranks("torchrun", *words, "python", "train.py"))
    for name in ("worker-0", "worker-1"):
        engine.lives(name, 1, process)
    engine.goes_on("worker-1")
    assert list((engine.folder / "saves").glob("*/manifest.json")) == []
    process.terminate()
    code, output = engine.finish(process)
    assert code != 0 and list((engine.folder / "saves").glob("*/manifest.json")), output
    engine.check_nothing_left()
