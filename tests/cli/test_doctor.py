"""`syncline doctor`: what works is said, and what does not comes with what to do about it."""

from __future__ import annotations

import errno
import json
import pathlib
import resource
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.patience import PATIENCE
from typer.testing import CliRunner

from syncline.cli import checks, connections, doctor, engines
from syncline.cli.checks import GIB, Check, Finding
from syncline.cli.main import app
from syncline.errors import ConfigError, FrameError
from syncline.net import shm, tcp

NAMES = [check.name for check in doctor.CHECKS]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(connections, "STEP_SECONDS", PATIENCE)
    return tmp_path


def no_space(*_: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


# -- a healthy machine --------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", doctor.CHECKS, ids=NAMES)
def test_every_check_finds_one_line_and_a_remedy_where_needed(check: Check) -> None:
    import torch  # noqa: F401  # doctor's own second check

    finding = check.run()
    assert finding.text and "\n" not in finding.text
    assert (finding.level == "ok") == (not finding.remedy)
    assert "please report" not in finding.remedy, finding


def test_what_jobs_cannot_do_without_works_here() -> None:
    for look in (checks.python, checks.torch, checks.packages, connections.shared_memory, connections.loopback):
        assert look().level == "ok"
    assert connections.small_job().text == "registered, pushed and pulled in this process, exactly"


def test_command_shows_every_check_and_counts() -> None:
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for name in NAMES:
        assert f" {name} " in result.output
    assert result.output.splitlines()[-1].startswith("no problems, ")


def test_json_has_every_check() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.output)
    assert [check["name"] for check in found["checks"]] == NAMES
    assert {key for check in found["checks"] for key in check} == {"name", "level", "finding", "remedy"}
    assert found["problems"] == 0 and result.exit_code == 0


def test_help_has_an_example() -> None:
    assert "Example:  syncline doctor" in CliRunner().invoke(app, ["doctor", "--help"]).output


# -- a machine where something is wrong ---------------------------------------------------------------------


def test_a_problem_is_exit_code_1_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Check("gravity", lambda: Finding("problem", "points upwards", "turn the machine over"))
    doubtful = Check("weather", lambda: Finding("warning", "it rains", "close the windows"))
    monkeypatch.setattr(doctor, "CHECKS", (wrong, doubtful))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "points upwards" in result.output and "→ turn the machine over" in result.output
    assert result.output.splitlines()[-1] == "1 problem, 1 warning"
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert found["problems"] == 1 and found["checks"][0]["remedy"] == "turn the machine over"


def test_a_warning_alone_is_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (Check("weather", lambda: Finding("warning", "it rains", "wait")),))
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


def test_a_check_that_breaks_is_a_finding_and_no_traceback() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("by nothing")

    finding = Check("broken", broken).run()
    assert finding.level == "problem" and finding.text == "ZeroDivisionError: by nothing"
    assert "report" in finding.remedy


def test_torch_that_is_not_installed_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = checks.torch()
    assert finding.level == "ok" and "servers compute with NumPy" in finding.text
    assert "pip install 'syncline[torch]'" in finding.text


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "torch.py").write_text('raise ImportError("libtorch.so: wrong ELF class")')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    finding = checks.torch()
    assert finding.level == "problem" and "cannot be used: ImportError: libtorch.so" in finding.text
    assert finding.remedy == "install torch 2.4 or newer"


def test_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(__version__="2.1.2", zeros=lambda _: SimpleNamespace(add_=lambda _: None))
    monkeypatch.setitem(sys.modules, "torch", old)
    assert checks.torch() == Finding("problem", "2.1.2 is too old", "install torch 2.4 or newer")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    finding = checks.packages()
    assert finding.level == "problem" and finding.text.startswith("missing: cryptography")
    assert "make setup" in finding.remedy


def test_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.configuration, "num_cores", lambda: 1)
    assert checks.cores().level == "warning" and "taskset" in checks.cores().remedy


def test_little_memory_and_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shm, "available_bytes", lambda: GIB // 2)
    assert checks.memory().level == "warning" and checks.memory().text == "0.5 GiB available"
    assert "memory limit" in checks.memory().remedy
    monkeypatch.setattr(checks.shm, "available_bytes", lambda: None)
    assert checks.memory().level == "ok" and "unknown" in checks.memory().text


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert checks.open_files() == Finding("warning", "at most 256 per process", "ulimit -n 4096")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert checks.open_files().text == "no limit"


def test_gpus_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 0))
    monkeypatch.setitem(sys.modules, "torch", blind)
    monkeypatch.setattr(checks.configuration, "num_gpus", lambda: 2)
    finding = checks.gpus()
    assert finding.level == "warning" and finding.text.startswith("2 installed, torch sees none")
    assert "CUDA" in finding.remedy


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_name=lambda _: "Abacus 9")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert checks.gpus() == Finding("ok", "2: Abacus 9")


def test_runs_that_cannot_be_written(elsewhere: Path) -> None:
    (elsewhere / "syncline.toml").write_text('runs = "taken"\n')
    (elsewhere / "taken").write_text("a file where a folder should be")
    finding = checks.disk()
    assert finding.level == "problem" and finding.text == "taken/ cannot be written, and logs go there"
    assert 'runs = "…"' in finding.remedy


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB // 4))
    assert checks.disk().level == "warning" and checks.disk().text == "0.2 GiB free for runs/"


def test_fashion_mnist_is_found_by_its_files_and_only_if_all_are_there(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from syncline.data import datasets

    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", elsewhere / "nowhere")
    monkeypatch.setenv("SYNCLINE_DATA", str(elsewhere))
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    names = list(datasets.SHA256)
    for name in names[:-1]:
        (elsewhere / f"{name}.gz").touch()
    finding = checks.fashion_mnist()
    assert finding.level == "warning" and "make data" in finding.remedy
    (elsewhere / names[-1]).touch()
    assert checks.fashion_mnist() == Finding("ok", f"in $SYNCLINE_DATA: {elsewhere}")


def test_no_shared_memory_is_a_warning_since_jobs_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "create", no_space)
    finding = connections.shared_memory()
    assert finding.level == "warning" and finding.text == "cannot be made: Cannot allocate memory"
    assert "TCP" in finding.remedy


def test_no_unix_socket_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "unix_pair", no_space)
    finding = connections.shared_memory()
    assert finding == Finding("problem", "no abstract Unix socket: Cannot allocate memory", "use --transport tcp")


def test_memory_that_is_not_sealed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "seal", lambda fd, is_final: None)
    finding = connections.shared_memory()
    assert finding.level == "problem" and "not sealed" in finding.text and finding.remedy == "use --transport tcp"


def test_a_descriptor_that_gets_lost_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "send_fds", lambda sock, buffers, fds: sock.sendall(buffers[0]))
    assert connections.shared_memory().text == "no file descriptor came over a Unix socket"


def test_loopback_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("cannot listen on 127.0.0.1: Cannot assign requested address")

    monkeypatch.setattr(tcp, "bind", refuse)
    finding = connections.loopback()
    assert finding.level == "problem" and "Cannot assign requested address" in finding.text
    assert "ip link set lo up" in finding.remedy


def test_a_handshake_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise FrameError("no handshake within 5 s")

    monkeypatch.setattr(tcp, "connect_tcp", refuse)
    assert "no handshake within 5 s" in connections.loopback().text


def test_ssl_without_tls_1_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def old() -> None:
        raise ssl.SSLError("unsupported protocol")

    monkeypatch.setattr(connections, "client_context", old)
    finding = connections.tls()
    assert finding.level == "warning" and "several hosts cannot run" in finding.text and "TLS 1.3" in finding.remedy


def test_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", Nowhere)
    finding = connections.address()
    assert finding.level == "warning" and "Network is unreachable" in finding.text and "--bind" in finding.remedy


@pytest.mark.parametrize("present", [True, False])
def test_namespaces_that_are_not_there_are_no_fault(present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.shutil, "which", lambda name: "false" if present else None)
    finding = connections.namespaces()
    assert finding.level == "ok" and "only tests with several hosts" in finding.text


@pytest.mark.parametrize("name", ["disk", "small job"])
def test_a_wrong_syncline_toml_is_found(name: str, elsewhere: Path) -> None:
    import torch  # noqa: F401

    (elsewhere / "syncline.toml").write_text('polcy = "sync"\n')
    finding = next(check for check in doctor.CHECKS if check.name == name).run()
    assert finding.level == "problem" and "unknown setting 'polcy'" in finding.text
    assert "syncline.toml" in finding.text and finding.remedy == "correct what this names"


def test_the_small_job_needs_a_torch_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert connections.small_job().text == "not tried: torch cannot be used"


# -- hosts --------------------------------------------------------------------------------------------------


def test_hosts_that_answer_and_hosts_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix is a command of this host: it lets one name through only."""
    monkeypatch.setattr(engines, "TRY_SECONDS", PATIENCE)
    prefix = """sh -c 'test "$0" = good && exec "$@"; echo "no route to $0" >&2; exit 7' {host}"""
    words = ["doctor", "--on", "ssh", "-H", "localhost:2,good,bad", "--remote", prefix, "--json"]
    result = CliRunner().invoke(app, words)
    found = {check["name"]: check for check in json.loads(result.output)["checks"]}
    assert result.exit_code == 1 and list(found) == ["command", "localhost", "good", "bad", "folder"]
    assert found["localhost"]["level"] == found["good"]["level"] == "ok", found
    assert found["bad"]["level"] == "problem" and "exit code 7: no route to bad; each" in found["bad"]["finding"]
    assert "try sh -c" in found["bad"]["remedy"]


def test_hosts_are_for_ssh_and_a_prefix_has_to_be_there() -> None:
    with pytest.raises(ConfigError, match="-H and --remote are for --on ssh"):
        CliRunner().invoke(app, ["doctor", "-H", "a"], catch_exceptions=False)
    result = CliRunner().invoke(app, ["doctor", "--on", "ssh", "--remote", "no-such-shell {host}", "--json"])
    assert result.exit_code == 1 and "there is no no-such-shell" in result.output


# -- engines ------------------------------------------------------------------------------------------------


def on_engine(engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> dict[str, Finding]:
    """What doctor finds where only these commands are installed, each a script of the shell."""
    (folder / "bin").mkdir()
    for name, text in commands.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.setattr(engines, "TRY_SECONDS", PATIENCE)
    result = CliRunner().invoke(app, ["doctor", "--on", engine, "--json"])
    found = json.loads(result.output)
    assert result.exit_code == (1 if found["problems"] else 0)
    return {one["name"]: Finding(one["level"], one["finding"], one["remedy"]) for one in found["checks"]}


@pytest.mark.parametrize(
    ("kubectl", "level", "text", "remedy"),
    [
        ("echo jobsets.jobset.x-k8s.io", "ok", "the cluster answers, and knows JobSets", ""),
        ("exit 0", "warning", "the cluster knows no JobSets", "--plain"),
        ("echo 'connection refused' >&2; exit 1", "problem", "connection refused", "kubectl cluster-info"),
    ],
    ids=["jobsets", "plain", "away"],
)
def test_kubernetes(
    kubectl: str, level: str, text: str, remedy: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_engine("kubernetes", elsewhere, monkeypatch, kubectl=kubectl)
    assert list(found) == ["kubectl", "the cluster"]
    assert found["kubectl"] == Finding("ok", str(elsewhere / "bin" / "kubectl"), "")
    finding = found["the cluster"]
    assert (finding.level, finding.text) == (level, text) and remedy in finding.remedy


def test_a_cluster_that_does_not_answer(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1.0)

    monkeypatch.setattr(engines.subprocess, "run", silent)
    finding = on_engine("kubernetes", elsewhere, monkeypatch, kubectl="")["the cluster"]
    assert finding.level == "problem" and "did not answer within" in finding.text


def test_no_kubectl_is_no_problem(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`syncline manifest` makes its objects without."""
    found = on_engine("kubernetes", elsewhere, monkeypatch)
    assert {finding.level for finding in found.values()} == {"warning"}
    assert "install it" in found["kubectl"].remedy


def test_mpi(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = 'test "$1" = --version && echo "mpirun (Open MPI) 4.1.4" && exit; shift 2; exec "$@"'
    found = on_engine("mpi", elsewhere, monkeypatch, mpirun=mpirun)
    assert list(found) == ["mpirun", "a process", "token"]
    assert found["mpirun"].text == f"{elsewhere / 'bin' / 'mpirun'}: mpirun (Open MPI) 4.1.4"
    assert found["a process"] == Finding("ok", "starts a process here", "")
    assert found["token"].level == "ok" and "SYNCLINE_TOKEN_FILE" in found["token"].text


def test_mpi_that_starts_nothing(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = "echo ------; echo 'mpirun has detected an attempt to run as root.'; exit 1"
    finding = on_engine("mpi", elsewhere, monkeypatch, mpirun=mpirun)["a process"]
    assert finding.level == "problem" and "exit code 1: mpirun has detected an attempt to run as root" in finding.text


def test_no_mpi(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_engine("mpi", elsewhere, monkeypatch)
    assert [finding.level for finding in found.values()] == ["problem", "problem", "ok"]
    assert "mpiexec.hydra" in found["mpirun"].text and "openmpi-bin" in found["mpirun"].remedy


def test_a_token_file_that_is_wrong(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TOKEN_FILE", str(elsewhere / "nowhere"))
    finding = on_engine("mpi", elsewhere, monkeypatch)["token"]
    assert finding.level == "problem" and "nowhere" in finding.text


def test_torchrun(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself starts in tests of engines: torchrun takes seconds, and its own port."""
    tried: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        tried.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(engines.subprocess, "run", run)
    found = on_engine("torchrun", elsewhere, monkeypatch)
    assert list(found) == ["torchrun", "a process", "token"]
    assert found["torchrun"].text.startswith("of torch ") and found["a process"].text == "starts a process here"
    assert [command[1:4] for command in tried] == [["-m", "torch.distributed.run", "--standalone"]]


def test_torchrun_without_torch(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    found = on_engine("torchrun", elsewhere, monkeypatch)
    assert [finding.level for finding in found.values()] == ["problem", "problem", "ok"]
    assert found["torchrun"].remedy == "pip install 'syncline[torch]'"
