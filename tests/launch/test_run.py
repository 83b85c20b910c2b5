"""`syncline run`: real processes, every policy, both transports, and the ways a job can end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.launch.played import PATIENT_END
from tests.patience import JOB_PATIENCE, PATIENCE, PATIENT_TOML

LEDGER = """
    import json, sys
    import numpy as np
    import syncline
    job = syncline.init()
    N, ME, PUSHES = job.world_size, job.rank, 25  # both change when the other has left
    job.kv.register({"ledger": np.zeros((N, PUSHES), np.float32)}, syncline.Rule("Add"), reduce="sum")
    job.kv.register({"x": np.zeros(200_000, np.float32)}, syncline.Rule("SGD", lr=1.0), reduce="sum")
    for q in range(PUSHES):
        grads = job.kv.gradients()
        grads["ledger"][:] = 0
        grads["ledger"][ME, q] = 1
        grads["x"][:] = ME + 1
        out = job.kv.push_pull(grads).wait()
        assert len(np.unique(out["x"])) <= 2, "torn: x lies in one slice per server"
    job.barrier("all in")
    pulled = job.kv.pull()
    assert (pulled["ledger"] == 1).all(), pulled["ledger"]
    assert (pulled["x"] == -PUSHES * N * (N + 1) / 2).all(), pulled["x"]
    assert "torch" not in sys.modules
    stats = job.stats()
    if ME == 0:
        print("SHARED", all(w.wire.bytes_received < 2_000_000 for w in stats.servers))
        print("EXACT", N, stats.lag_max)
"""


def _ways() -> list[Any]:
    """Shared memory and a window of answers not waited for in `make test`, where tests/launch/test_namespaces.py has
    sockets; every way in proof."""
    quick = {("async", "shm", 2)}
    ways = [(p, t, w) for p in ("sync", "bounded:2", "async") for t in ("shm", "tcp") for w in (0, 2)]
    return [
        pytest.param(*way, marks=[] if way in quick else [pytest.mark.proof], id="-".join(map(str, way)))
        for way in ways
        if not (way[0] == "sync" and way[2])
    ]


@pytest.mark.parametrize(("policy", "transport", "window"), _ways())
def test_the_ledger_is_exact_between_processes(commands: Any, policy: str, transport: str, window: int) -> None:
    """Two workers without torch, two servers: nothing lost, nothing doubled, nothing torn."""
    options = ("-w", "2", "-s", "2", "--policy", policy, "--transport", transport, "--window", str(window))
    result = commands.run("run", *options, commands.script(LEDGER), is_forked=False)
    assert result.code == 0, result.output
    assert "EXACT 2" in result.output
    assert f"SHARED {transport == 'shm'}" in result.output
    head, *rows = result.output[result.output.index("syncline: the job has") :].splitlines()
    assert head == "syncline: the job has finished: all 2 workers ended well"
    steps = 25 if policy == "sync" else 50
    assert rows[1] == f"  steps        {steps} ({policy})", rows
    assert rows[-1].startswith("  logs         runs/train-"), rows


TRAIN = """
    import torch, syncline
    from syncline.torch import DataLoader, DistributedOptimizer
    job = syncline.init()
    for clips in (False, True):
        torch.manual_seed(job.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 600), torch.nn.Tanh(), torch.nn.Linear(600, 300),
                                    torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 2)).to(job.device)
        for p in model.parameters():
            torch.nn.init.constant_(p, 0.01)
        torch.manual_seed(7)
        data = torch.utils.data.TensorDataset(torch.randn(22, 8), torch.randint(2, (22,)))
        opt = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
        for epoch in range(2):
            for x, y in DataLoader(data, batch_size=4, shuffle=True):
                torch.nn.functional.cross_entropy(model(x), y).backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                opt.step(); opt.zero_grad()
        job.barrier(f"end {clips}")
        print("SUM", job.rank, clips, repr(sum(p.double().sum().item() for p in model.parameters())), flush=True)
"""


def _sums(output: str) -> dict[tuple[str, str], str]:
    lines = [line.rpartition("SUM ")[2].split() for line in output.splitlines() if "SUM " in line]
    return {(words[0], words[1]): words[2] for words in lines}


@pytest.mark.proof
def test_tcp_and_shared_memory_give_the_same_bits(commands: Any) -> None:
    """Gradients staged early over TCP, some edited after backward, give what shared memory gives."""
    script, sums = commands.script(TRAIN), []
    for transport in ("shm", "tcp"):
        result = commands.run("run", "-w", "2", "-s", "2", "--transport", transport, script)
        assert result.code == 0, result.output
        sums.append(found := _sums(result.output))
        assert len(found) == 4, result.output
        assert all(found["0", clips] == found["1", clips] for clips in ("False", "True")), result.output
        assert found["0", "False"] != found["0", "True"]
        before, _, after = result.output.partition("SUM 0 False")
        assert "clips this worker's own gradient" not in before and "clips this worker's own gradient" in after
    assert sums[0] == sums[1]


def test_a_workers_exception_is_shown_once_and_its_exit_code_is_passed_on(commands: Any) -> None:
    script = commands.script("""
        import numpy as np, syncline, sys, time
        job = syncline.init()
        job.kv.register({"x": np.zeros(2)}, syncline.Rule("SGD", lr=1.0))
        if job.rank == 1:
            raise RuntimeError("no more data")
        job.kv.push({"x": np.ones(2)}).wait()
    """)
    result = commands.run("run", "-w", "2", "--max-restarts", "0", script)
    assert result.code == 1
    assert result.output.count("Traceback") == 1 and result.output.count("RuntimeError: no more data") == 1
    assert "worker-1 | worker-1 failed:" in result.output and "runpy" not in result.output
    assert "the job has failed: worker-1 ended with exit code 1" in result.output
    assert "runs/train-" in result.output and "worker-1.log" in result.output
    assert "  logs         runs/train-" in result.output.splitlines()[-1], "the table is the last word"


@pytest.mark.proof
def test_the_scripts_own_exit_code_is_the_jobs(commands: Any) -> None:
    script = commands.script("""
        import sys, syncline
        job = syncline.init()
        job.barrier("both")
        sys.exit(7 if job.rank == 1 else 0)
    """)
    result = commands.run("run", "-w", "2", "--max-restarts", "0", script)
    assert result.code == 7, result.output
    assert "worker-1 ended with exit code 7" in result.output


@pytest.mark.proof
def test_another_model_on_one_worker(commands: Any) -> None:
    script = commands.script("""
        import torch, syncline
        from syncline.torch import DistributedOptimizer
        job = syncline.init()
        model = torch.nn.Linear(120 - 36 * job.rank, 10)
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    """)
    result = commands.run("run", "-w", "2", "--max-restarts", "0", script)
    assert result.code == 1
    expected = (
        "LayoutError: worker-1 registered 'weight' as float32[10, 84], the job has float32[10, 120]; start worker-1"
    )
    assert expected in result.output
    assert "src/syncline" not in result.output  # no traceback of ours


STUCK = """
    import numpy as np, syncline, time
    job = syncline.init()
    job.kv.register({"x": np.zeros(2)}, syncline.Rule("SGD", lr=1.0))
    print("READY", flush=True)
    if job.rank == 1:
        time.sleep(600)
    job.kv.push({"x": np.ones(2)}).wait()
"""


@pytest.mark.parametrize(
    "victim",
    [
        "worker-1",
        pytest.param("server-0", marks=pytest.mark.proof),
        pytest.param("coordinator", marks=pytest.mark.proof),
    ],
)
def test_without_restarts_a_death_ends_the_job_at_once_and_is_named(commands: Any, victim: str) -> None:
    script = commands.script(STUCK.replace("time.sleep(600)", "while True: time.sleep(0.05); job.kv.pull()"))
    program = ("-m", "syncline") if victim == "coordinator" else ("-c", PATIENT_END)
    process = commands.start("run", "-w", "2", "--max-restarts", "0", "--name", "mortal", script, program=program)
    commands.wait_for("READY", "worker-1")
    os.kill(commands.members()[victim], signal.SIGKILL)
    result = commands.finish(process)
    assert result.code != 0
    assert f"the job has failed: {victim} was killed by SIGKILL" in result.output
    assert result.output.count("Traceback") == 0
    if victim != "coordinator":
        log = (commands.folder / "runs/mortal/worker-0.log").read_text()
        assert f"syncline.JobFailed: the job has ended: {victim} was killed by SIGKILL" in log
    commands.check_nothing_left()


@pytest.mark.parametrize(
    ("number", "is_stubborn"), [(signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.proof)]
)
def test_ctrl_c_ends_everything_soon(commands: Any, number: int, is_stubborn: bool) -> None:
    """A worker that ignores SIGTERM, too."""
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if is_stubborn else ""
    script = commands.script(STUCK.replace("        time.sleep(600)", f"        {ignores}        time.sleep(600)"))
    began = time.monotonic()
    process = commands.start("run", "-w", "2", script)
    commands.wait_for("READY", "worker-1")
    started, began = time.monotonic() - began, time.monotonic()
    process.send_signal(number)
    result = commands.finish(process)
    assert time.monotonic() - began < max(60.0, 5 * started), "a starved machine needs longer, as for the start"
    assert result.code == 128 + number and f"interrupted by {signal.Signals(number).name}" in result.output
    assert "Traceback" not in result.output
    assert "its slices go to other servers" not in result.output, "there is no job any more"
    commands.check_nothing_left(0.0)


def test_a_killed_launcher_leaves_nothing_behind(commands: Any) -> None:
    """Each member holds a lifeline; a worker inside a long call of C goes too."""
    script = commands.script(STUCK.replace("time.sleep(600)", "import re; re.match('(a+)+$', 'a' * 40 + 'b')"))
    process = commands.start("run", "-w", "2", script)
    commands.wait_for("READY", "worker-1")
    assert set(commands.members()) == {"coordinator", "server-0", "worker-0", "worker-1"}
    process.kill()
    process.wait()
    commands.check_nothing_left()


@pytest.mark.proof
def test_a_script_that_never_joins(commands: Any) -> None:
    result = commands.run("run", "-w", "2", commands.script("print('hello')"))
    assert result.code == 1
    assert "ended without having joined the job; does the script call syncline.init()?" in result.output


def test_a_push_after_close_is_an_error_at_once(commands: Any) -> None:
    """It waited ten minutes for servers that had ended."""
    script = commands.script("""
        import numpy as np, syncline
        job = syncline.init()
        job.kv.register({"x": np.zeros(2)}, syncline.Rule("SGD", lr=1.0))
        job.kv.push({"x": np.ones(2)}).wait()
        job.close()
        job.kv.push({"x": np.ones(2)}).wait()
    """)
    result = commands.run("run", "-w", "2", script)
    assert result.code == 1, result.output
    assert "syncline.ConfigError: worker-0 has left its job: job.close() was called" in result.output, result.output


def test_what_is_said_at_launch_is_heard(commands: Any) -> None:
    """torchrun's environment, arguments, a module. What init() says loses to the file, and that to the launch: policy
    from the file, window from the launch, the others alone. And --stop ends it."""
    commands.script(
        """
        import json, os, sys, time
        import numpy as np
        import syncline
        job = syncline.init(policy="async", window=3, wait_seconds=330.0)
        print("CONFIG", job.config.policy, job.config.window, job.config.wait_seconds, job.config.start_seconds)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        print("ENV", json.dumps([os.environ[n] for n in names]), sys.argv[1:], job.local_rank, flush=True)
        job.kv.register({"x": np.zeros(2)}, syncline.Rule("SGD", lr=1.0))
        while not job.should_stop and job.own_step < 5000:
            job.kv.push({"x": np.ones(2)}).wait()
            job.report(score=job.own_step)
            time.sleep(0.01)
    """,
        "mymodule.py",
    )
    patient = PATIENT_TOML.replace(f"start_seconds = {PATIENCE}", "start_seconds = 350.0")
    (commands.folder / "syncline.toml").write_text(f'policy = "bounded:3"\nwindow = 2\n{patient}')
    words = (
        "-w",
        "2",
        "--window",
        "1",
        "--stop",
        "score>=5",
        "--env",
        "torchrun",
        "-m",
        "mymodule",
        "--epochs",
        "3",
        "x y",
    )
    result = commands.run("run", *words)
    assert result.code == 0, result.output
    assert "stopped by   --stop 'score>=5': score = " in result.output, result.output
    assert "CONFIG bounded:3 1 330.0 350.0" in result.output, result.output
    lines = sorted(line.rpartition("ENV ")[2] for line in result.output.splitlines() if "ENV " in line)
    assert len(lines) == 2 and all("['--epochs', '3', 'x y']" in line for line in lines)
    ranks = [json.loads(line[: line.index("]") + 1]) for line in lines]
    assert [r[:3] for r in ranks] == [["0", "2", "0"], ["1", "2", "1"]] and ranks[0][3] == "127.0.0.1"


@pytest.mark.proof
def test_too_little_memory_for_arenas_falls_back_and_says_so_once(commands: Any) -> None:
    script = commands.script("""
        import errno, numpy as np, syncline
        from syncline.net import shm
        def create(num_bytes):
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        shm.create = create
        job = syncline.init()
        job.kv.register({"x": np.zeros(1000), "y": np.zeros(10)}, syncline.Rule("SGD", lr=1.0))
        for _ in range(3):
            out = job.kv.push_pull({"x": np.ones(1000)}).wait()
        print("VALUE", out["x"][0])
    """)
    result = commands.run("run", "-w", "1", script)
    assert result.code == 0 and "VALUE -3.0" in result.output, result.output
    said = "too little memory for arenas of 8128 bytes (1 x 8128): Cannot allocate memory; falls back to TCP"
    assert result.output.count(said) == 1
    refused = commands.run("run", "-w", "1", "--transport", "shm", script)
    assert refused.code == 1 and "use --transport auto or tcp" in refused.output


@pytest.mark.proof
def test_a_full_disk_or_a_closed_pipe_holds_up_nobody(commands: Any) -> None:
    """Logs that cannot be written are said once; `syncline run … | head -1` ends instead of hanging."""
    script = commands.script("""
        import os, syncline
        if os.path.isdir("runs/full") and not os.path.lexists("runs/full/worker-0.log"):
            os.symlink("/dev/full", "runs/full/worker-0.log")  # old logs are cleared, and nothing was written yet
        job = syncline.init()
        for number in range(4_000):
            print("line", number, "x" * 100)
    """)
    process = commands.start("run", "--name", "full", script)
    result = commands.finish(process)
    assert result.code == 0 and "line 3999" in result.output
    assert result.output.count("logs cannot be kept in runs/full: No space left on device") == 1
    commands.script("print('line\\n' * 4_000)", "talks.py")  # and ends, so that a hang is one of the launcher
    shell = f"{sys.executable} -m syncline run talks.py | head -1"
    done = subprocess.run(
        shell, shell=True, cwd=commands.folder, capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    assert "Traceback" not in done.stderr
    commands.check_nothing_left()
