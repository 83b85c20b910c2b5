"""A Slurm cluster of four nodes on this machine: munged, slurmctld and four slurmd, in a folder of their own.

They run as root, as Slurm's daemons do, and are ended by their process ids.
"""

from __future__ import annotations

import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

import pytest
from tests.patience import PATIENCE

SBIN = "/usr/sbin"
COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=20
MinJobAge=600
UnkillableStepTimeout=120
GresTypes=gpu
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=16 RealMemory=2000 Gres=gpu:2
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=60 State=UP OverSubscribe=NO
PartitionName=short Nodes=n[1-4] MaxTime=1 State=UP
"""
#: Each node has two GPUs as far as Slurm counts them: it hands out their numbers, and nobody opens these files.
GRES = "Name=gpu File={folder}/gpu[0-1] Flags=nvidia_gpu_env\n"
NODES = ("n1", "n2", "n3", "n4")


def why_not() -> str:
    """Why no cluster can run here; empty: it can."""
    path = f"{os.environ['PATH']}:{SBIN}"
    missing = [name for name in COMMANDS if shutil.which(name, path=path) is None]
    if missing:
        return f"there is no {', '.join(missing)}: make test-engines installs slurm-wlm and munge, as root on Debian"
    return "" if os.geteuid() == 0 else "Slurm's daemons start as root"


class Cluster:
    """Starts the daemons; `environment` lets Slurm's commands find them."""

    def __init__(self, folder: pathlib.Path) -> None:
        if reason := why_not():
            pytest.skip(reason)
        self.folder = folder
        folder.mkdir(parents=True, mode=0o755)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        self._daemons: dict[str, int] = {}  # their process ids
        first, host = _free_ports(len(NODES) + 1), socket.gethostname()
        text = CONFIG.format(host=host, folder=folder, port=first, first=first + 1, last=first + len(NODES))
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(GRES.format(folder=folder))
        for number, device in enumerate(("/dev/null", "/dev/zero")):  # Slurm takes devices only
            (folder / f"gpu{number}").symlink_to(device)
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:{SBIN}"}
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

    def start(self) -> None:
        self._start(
            "munged", "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket",
            f"--key-file={self.folder}/munge.key", f"--log-file={self.folder}/munged.log",
            f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/seed", "--num-threads=2",
        )  # fmt: skip
        wait_until((self.folder / "munge.socket").exists, "munged has no socket")
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        """All are there, and have nothing to do."""
        wait_until(
            lambda: self.say("sinfo", "-h", "-p", "main", "-o", "%T", "-N").split().count("idle") >= len(NODES),
            "no nodes",
        )

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def _start(self, name: str, *words: str) -> None:
        """No child of this process: a test that starts a node again would leave one behind."""
        with open(self.folder / f"{name}.out", "ab") as out:
            done = subprocess.run(
                ["sh", "-c", '"$@" >&2 & echo $!', "sh", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=out, start_new_session=True, env=self._all(), check=True,
            )  # fmt: skip
        self._daemons[name] = int(done.stdout)

    def _all(self) -> dict[str, str]:
        return {**os.environ, **self.environment}

    def say(self, *words: str) -> str:
        done = subprocess.run(words, env=self._all(), capture_output=True, text=True, timeout=PATIENCE)
        return done.stdout

    def state(self, job: str) -> str:
        return self.say("squeue", "-h", "-j", job, "-o", "%T").strip()

    def start_soon(self, job: str) -> None:
        """A requeued job waits two minutes by itself. In the same second its nodes would still refuse it."""
        self.say("scontrol", "update", f"JobId={job}", "StartTime=now+5seconds")

    def lose(self, node: str) -> None:
        """The node is gone: its slurmd and all that it has started are killed at once."""
        daemon = self._daemons.pop(node)
        pids = [daemon, *_children_of([daemon])]
        pids += [pid for step in self._steps(node) for pid in (step, *_children_of([step]))]
        for pid in pids:
            _kill(pid)
        wait_until(lambda: not lives(daemon), f"the daemon of {node} lives on")

    def _steps(self, node: str) -> list[int]:
        """slurmstepd processes of this node: they have left their slurmd."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or not (entry / "comm").read_text().startswith("slurmstepd"):
                    continue
                if any(self._is_of(pid, node) for pid in (int(entry.name), *_children_of([int(entry.name)]))):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def _is_of(self, pid: int, node: str) -> bool:
        """Whether this process is one of this node, and of this cluster: another run of these tests may have one."""
        try:
            environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        conf = f"SLURM_CONF={self.environment['SLURM_CONF']}"
        return f"SLURMD_NODENAME={node}".encode() in environment and conf.encode() in environment

    def cancel_all(self) -> None:
        """Ends all jobs, and waits for the nodes to be free."""
        for job in self.say("squeue", "-h", "-o", "%i").split():
            self.say("scancel", job)
        wait_until(lambda: not self.say("squeue", "-h", "-o", "%i").split(), "a job did not end")

    def close(self) -> None:
        steps = [pid for node in NODES for pid in self._steps(node)]
        for pid in reversed(self._daemons.values()):
            _kill(pid, signal.SIGTERM)
        until = time.monotonic() + PATIENCE / 10
        while any(map(lives, self._daemons.values())) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in self._daemons.values():
            _kill(pid)
        for pid in steps:
            _kill(pid)


def _children_of(parents: Sequence[int]) -> list[int]:
    """All descendants."""
    above: dict[int, int] = {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                above[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    below, todo = [], list(parents)
    while todo:
        parent = todo.pop()
        children = [pid for pid, its in above.items() if its == parent]
        below += children
        todo += children
    return below


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def lives(pid: int) -> bool:
    """Whether this process runs; one that has ended may wait for its parent to hear of it."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _free_ports(number: int) -> int:
    """The first of so many ports in a row that nothing listens on."""
    for first in range(21_000 + os.getpid() % 5_000, 32_000, number):
        try:
            for port in range(first, first + number):
                with socket.socket() as sock:
                    sock.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise AssertionError("no free ports")


def wait_until(is_so: object, what: str) -> None:
    """Time in which this process stands still, like all others here, does not count."""
    assert callable(is_so)
    waited, before = 0.0, time.monotonic()
    while not is_so():
        time.sleep(0.05)
        now = time.monotonic()
        waited, before = waited + min(1.0, now - before), now
        assert waited < PATIENCE, what
