"""What cannot be is refused before anything starts, in one line that says what to do instead."""

from __future__ import annotations

import pathlib
import socket
import sys

import pytest

from syncline.cli.main import main


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, *words: str
) -> str:
    """Runs the command line in this process; its one line of complaint."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["syncline", *words])
    (folder / "train.py").write_text("import syncline\nsyncline.init()\n")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    assert not (folder / "runs").exists()
    return captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--policy", "bounded:-1", "train.py"],
            "policy = 'bounded:-1': must be one of sync, sync:spare=N, bounded:K (K = 0, 1, 2, …), bounded:K,damped",
        ),
        (["--policy", "fast", "train.py"], "policy = 'fast': must be one of sync, sync:spare=N, bounded:K"),
        (["--policy", "sync,damped", "train.py"], "damped goes with bounded:K or async, e.g. bounded:4,damped"),
        (["--policy", "sync:spare=x", "train.py"], "spare=N is the number of workers that a round does not wait for"),
        (
            ["-w", "4", "--policy", "sync:spare=9", "train.py"],
            "of 4 workers at least one must be in a round; say sync:spare=3 or less, or more workers (-w)",
        ),
        (["--policy", "sync:2", "train.py"], "policy = 'sync:2': must be one of sync"),
        (["-w", "0", "train.py"], "workers = 0: must be at least 1"),
        (["-s", "0", "train.py"], "servers = 0: must be at least 1"),
        (
            ["-w", "many", "train.py"],
            "-w 'many': give a number of workers, or the least and the most, e.g. 4, 2:8 or auto",
        ),
        (["-w", "8:2", "train.py"], "-w '8:2': give a number of workers, or the least and the most"),
        (["-w", "auto:3:1", "train.py"], "-w 'auto:3:1': give a number of workers, or the least and the most"),
        (["-w", "auto:3", "train.py"], "-w 'auto:3': give a number of workers, or the least and the most"),
        (["-w", "2:3", "-H", "a:2,b:2", "train.py"], "-w 2:3 and -H a:2,b:2 (4 workers) cannot be combined"),
        (["--replicas", "2", "train.py"], "--replicas 2 needs two servers or more; this job has 1: use -s 2"),
        (["--replicas", "3", "-s", "3", "train.py"], "replicas = 3: must be at most 2"),
        (["--ack", "disk", "train.py"], "ack = 'disk': must be one of memory, replicated"),
        (
            ["--ack", "memory", "--replicas", "2", "-s", "2", "train.py"],
            "--ack memory and --replicas 2 cannot be combined; use --ack replicated",
        ),
        (["--max-restarts", "-1", "train.py"], "max_restarts = -1: must be at least 0"),
        (["--deadline-seconds", "0", "train.py"], "deadline_seconds = 0.0: must be at least 0.001"),
        (["--sync-every", "0", "train.py"], "sync_every = 0: must be at least 1"),
        (["--sync-every", "often", "train.py"], "--sync-every 'often': must be a number of steps, or auto"),
        (
            ["--sync-every", "auto", "--policy", "async", "--window", "1", "train.py"],
            "--sync-every auto and --window 1 cannot be combined: local steps go on from the parameters",
        ),
        (["--pull-every", "0", "train.py"], "pull_every = 0: must be at least 1"),
        (
            ["--pull-every", "4", "train.py"],
            "--pull-every 4 needs --policy bounded:K or async, on servers: in sync all workers of a round",
        ),
        (
            ["--pull-every", "4", "--exchange", "ring", "train.py"],
            "--pull-every 4 needs --policy bounded:K or async, on servers: in a ring all workers of a round",
        ),
        (
            ["--pull-every", "4", "--sync-every", "4", "--policy", "async", "train.py"],
            "--pull-every 4 and --sync-every 4 cannot be combined",
        ),
        (["--window", "1", "train.py"], "--window 1 needs --policy bounded:K or async"),
        (["--bad-pushes", "0", "train.py"], "bad_pushes = 0: must be at least 1"),
        (["--no-check-finte", "train.py"], "there is no option --no-check-finte; did you mean --no-check-finite?"),
        (
            ["--codec", "no.such:name", "train.py"],
            "--codec no.such:name: ModuleNotFoundError: No module named 'no'; servers need it as workers do",
        ),
        (["--pull-codec", "json:dumps", "train.py"], "--pull-codec json:dumps: function has no bound()"),
        (["--transport", "rdma", "train.py"], "transport = 'rdma': must be one of auto, shm, tcp"),
        (
            ["--transport", "shm", "-H", "a:1,b:1", "train.py"],
            "--transport shm and several hosts (-H) cannot be combined",
        ),
        (["-w", "3", "-H", "a:1,b:1", "train.py"], "-w 3 and -H a:1,b:1 (2 workers) cannot be combined"),
        (["-H", "a:x", "train.py"], "-H 'a:x': give hosts and numbers of workers, e.g. a:4,b:4"),
        (["-H", "a:1,a:2", "train.py"], "a is there twice"),
        (["--env", "mpi", "train.py"], "env = 'mpi': must be torchrun"),
        (["--name", "../x", "train.py"], "name = '../x': it is also the name of a folder"),
        (["--bind", "127.0.0.1:http", "train.py"], "--bind '127.0.0.1:http': give an address or address:port"),
        (["--bind", "203.0.113.7", "train.py"], "cannot listen on 203.0.113.7"),
        (["--stop", "loss.platau(5)", "train.py"], "--stop 'loss.platau(5)': at position 6, 'platau'"),
        (["--stop", "loss<1", "--stop", "x.plateau(5)", "train.py"], "Say min:x.plateau(…) or max:x.plateau(…)"),
        (["--on-plateau", "lr*0.1", "train.py"], "no --stop rule says what a plateau is"),
        (["--on-plateau", "wd*0.1", "--stop", "loss.plateau(5)", "train.py"], "--on-plateau 'wd*0.1': give a factor"),
        (["--max-time", "soon", "train.py"], "--max-time 'soon': give a duration, e.g. 90s, 30m, 2h"),
        (["--max-steps", "-1", "train.py"], "max_steps = -1: must be at least 0"),
        (["--best", "reach", "train.py"], "--best 'reach': is less or more of it better? Say min:reach or max:reach"),
        (["--average", "last:1", "train.py"], "--average 'last:1': give last:N (N checkpoints, from 2"),
        (["--checkpoint", "memory://saves", "train.py"], "every process has a memory of its own"),
        (["--sums", "gloo", "train.py"], "use --exchange ring"),
        (["--exchange", "ring", "--sums", "gloo", "-H", "a:1,b:1", "train.py"], "use --trust-network"),
        (["--exchange", "ring", "--sums", "nccl", "-w", "9999", "train.py"], "use --sums gloo"),
        (["nothere.py"], "there is no script nothere.py"),
        ([], "no script was given, e.g. syncline run -w 2 train.py"),
        (["--polcy", "async", "train.py"], "there is no option --polcy; did you mean --policy?"),
    ],
)
def test_run(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    assert message in refused(capsys, monkeypatch, tmp_path, "run", *words)


def test_a_port_in_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        error = refused(capsys, monkeypatch, tmp_path, "run", "--bind", where, "train.py")
    assert f"cannot listen on {where}: Address already in use; choose another port with --bind" in error


@pytest.mark.parametrize("address", ["0.0.0.0", "0.0.0.0:7000", "[::]:7000"])
def test_a_coordinator_by_hand_needs_an_address_that_members_can_reach(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    error = refused(capsys, monkeypatch, tmp_path, "coordinator", "--job", "job.json", "--bind", address)
    assert f"--bind {address}: members must know where to connect; give an address of this host" in error


def test_syncline_toml(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for text, message in (
        ("polcy = 'sync'", "unknown setting 'polcy'; choose from: ack, "),
        ("workers = 'two'", "workers = 'two': Expected `int`, got `str`"),
        ("workers = ", "syncline.toml: Invalid value"),
        ("stop = 'loss<'", "--stop 'loss<': at position 6, its end: a number is expected"),
        ("stop = ['loss<1', 'x.plateau(1)']", "min:x.plateau(…)"),
    ):
        (tmp_path / "syncline.toml").write_text(text)
        assert message in refused(capsys, monkeypatch, tmp_path, "run", "train.py")


@pytest.mark.parametrize("role", ["server", "worker"])
def test_a_job_file_that_is_none_or_that_others_can_read(
    role: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "job.json"
    script = ["train.py"] if role == "worker" else []
    file.write_text('{"job": "x"}')
    file.chmod(0o644)
    assert "can be read by others (mode 644); run chmod 600" in refused(
        capsys, monkeypatch, tmp_path, role, "--job", str(file), *script
    )
    file.chmod(0o600)
    assert "is not a job file: Object missing required field" in refused(
        capsys, monkeypatch, tmp_path, role, "--job", str(file), *script
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--every", "often", "--", "train.py"], "--every 'often': give a duration, e.g. 10s, 1.5m, 1h"),
        (["--for", "-1s", "--", "train.py"], "--for '-1s': give a duration"),
        (
            ["--roles", "worker,boss", "--", "train.py"],
            "--roles 'worker,boss': must be one of worker, server, ",
        ),
        (["--signal", "HUP", "--", "train.py"], "--signal 'HUP': must be one of KILL, STOP"),
        (["--", "-H", "a:1,b:1", "train.py"], "syncline chaos kills processes of this host only; leave -H out"),
        (["--", "-w", "0", "train.py"], "workers = 0: must be at least 1"),
        (["-w", "2", "--polcy", "x", "train.py"], "there is no option --polcy; did you mean --policy?"),
        ([], "no script was given"),
    ],
)
def test_chaos(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    assert message in refused(capsys, monkeypatch, tmp_path, "chaos", *words)


@pytest.mark.parametrize("command", ["status", "why", "scale"])
def test_a_job_that_does_not_run(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    words = ["-w", "2"] if command == "scale" else []
    error = refused(capsys, monkeypatch, tmp_path, command, "nothere", *words)
    assert "no job nothere runs under runs/; none runs now (--runs DIR says another folder)" in error
    if command == "scale":
        assert "give the numbers: -w WORKERS" in refused(capsys, monkeypatch, tmp_path, command, "nothere")


def test_every_help_has_an_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ("run", "coordinator", "server", "worker", "status", "why", "scale", "chaos", "doctor", "bench")
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["syncline", command, "--help"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert f"syncline {command}" in capsys.readouterr().out.partition("Example:")[2], command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demo", "worker-1"], "give one of --delay TIME, --pause and --resume"),
        (["demo", "worker-1", "--pause", "--resume"], "give one of --delay TIME, --pause and --resume"),
        (["demo", "worker-1", "--delay", "soon"], "--delay 'soon': give a duration, e.g. 200ms, 1.5s; --resume ends"),
        (["demo", "worker-1", "--delay", "-1s"], "--delay '-1s': give a duration"),
        (["demo", "worker-1", "--delay", "nan"], "--delay 'nan': give a duration"),
        (["demo", "worker-1", "--delay", ""], "--delay '': give a duration"),
    ],
)
def test_pace(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    assert message in refused(capsys, monkeypatch, tmp_path, "pace", *words)
