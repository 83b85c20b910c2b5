"""Jobs whose workers another launcher starts, by the real ones. `make test-engines` installs what is missing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest
from tests.engines.clusters import Cluster, wait_until
from tests.engines.rays import LOOPBACK, RAY_BIN, RayHosts
from tests.patience import JOB_PATIENCE, PATIENCE, PATIENT_TOML

from syncline.engines.slurm import MEETING
from syncline.launch import jobfile
from syncline.launch.folder import JOB_FILE
from syncline.store.disk import MANIFEST

#: Steps until the file `end` is there. Each life leaves its process id, its node and its first value. A later life
#: goes on from the parameters of the job.
STEPS = """
    import os, pathlib, time
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(3)}, syncline.Rule("SGD", lr=1.0))
    begin, node = job.kv.pull()["x"][0], os.environ.get("SLURMD_NODENAME", "-")
    pathlib.Path(f".{job.name}.{os.getpid()}").write_text(f"{os.getpid()} {node} {begin:g}")
    os.rename(f".{job.name}.{os.getpid()}", f"{job.name}.{os.getpid()}.here")
    for step in job.steps(10**9):
        job.kv.push({"x": np.ones(3)}).wait()
        pathlib.Path(f"at-{job.name}").write_text(str(step))
        time.sleep(0.02)
        if pathlib.Path("end").exists():
            break
    print(f"{job.name} ends", flush=True)
"""

#: Like `STEPS`, over 200 samples: in its own cell, each counts how often it was read and acknowledged (with
#: `--policy async`). All workers end with a whole epoch.
COUNTS = """
    import os, pathlib, time
    import numpy as np, syncline
    from syncline.data import ArraySource, batches
    job = syncline.init()
    job.kv.register({"seen": np.zeros(200)}, syncline.Rule("SGD", lr=1.0))
    node = os.environ.get("SLURMD_NODENAME", "-")
    pathlib.Path(f".{job.name}.{os.getpid()}").write_text(f"{os.getpid()} {node} {-job.kv.pull()['seen'].sum():g}")
    os.rename(f".{job.name}.{os.getpid()}", f"{job.name}.{os.getpid()}.here")
    source, step = ArraySource(np.arange(200)), 0
    for _ in range(10**6):
        for (samples,) in batches(source, 4, shuffle=True):
            seen = np.zeros(200)
            seen[samples] = -1.0
            job.kv.push({"seen": seen}).wait()
            step += 1
            pathlib.Path(f"at-{job.name}").write_text(str(step))
            time.sleep(0.02)
        if pathlib.Path("end").exists():
            break
    seen = job.kv.pull()["seen"]
    print(f"SEEN {seen.min():g} to {seen.max():g} times", flush=True)
"""

#: Settings by which every server has a part of these counts.
SPREAD = "slice_bytes = 256"

BIN = os.path.dirname(sys.executable)
MPI = {"mpirun.openmpi": ["--allow-run-as-root", "--oversubscribe"], "mpiexec.hydra": []}


def mpirun(kind: str, ranks: int, *command: str) -> list[str]:
    """The command line of this MPI; skips where it is missing."""
    path = shutil.which(kind)
    if path is None:
        pytest.skip(f"there is no {kind}: make test-engines installs it, as root on Debian")
    return [path, *MPI[kind], "-n", str(ranks), *command]


def torchrun(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def two_ranks(kind: str, *command: str) -> list[str]:
    """Two ranks of this command, by a kind of mpirun or by torchrun."""
    if kind == "torchrun":
        return torchrun("--standalone", "--nproc-per-node", "2", "--no-python", *command)
    return mpirun(kind, 2, *command)


class Engine:
    """Starts commands in a folder of its own, and sees that nothing of them is left."""

    def __init__(self, folder: pathlib.Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: what the engine's own commands need."""
        self.folder, self.environment = folder, dict(environment or {})
        self.cache = folder / "cache"
        self._started: list[subprocess.Popen[str]] = []
        self.settings()

    def leave_out_torch(self) -> None:
        """Members do not load it, which takes most of the time of a small job: servers compute with NumPy."""
        folder = self.folder / "without"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text('import sys\nsys.modules["torch"] = None\n')
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))

    def settings(self, text: str = "") -> None:
        """What syncline.toml says, beside the patience of tests."""
        self.said = text
        said = {line.partition("=")[0].strip() for line in text.splitlines()}
        patient = [line for line in PATIENT_TOML.splitlines() if line.partition("=")[0].strip() not in said]
        (self.folder / "syncline.toml").write_text("\n".join([text, *patient]))

    def script(self, text: str) -> str:
        (self.folder / "train.py").write_text(textwrap.dedent(text))
        return "train.py"

    def start(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SYNCLINE_")}
        own = {"XDG_CACHE_HOME": str(self.cache), "PATH": f"{BIN}:{os.environ['PATH']}", **self.environment}
        process = subprocess.Popen(
            list(words),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**kept, **own, **(environment or {})},
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        output, _ = process.communicate(timeout=JOB_PATIENCE)
        return process.returncode, output

    def run(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        return self.finish(self.start(words, environment))

    def wait_for(self, name: str, *processes: subprocess.Popen[str]) -> str:
        """Waits until the script has written this file; its text."""
        path, until = self.folder / name, time.monotonic() + JOB_PATIENCE
        while not path.exists():
            for process in processes:
                assert process.poll() is None, self.finish(process)[1]
            assert time.monotonic() < until, f"{name} was not written"
            time.sleep(0.05)
        return path.read_text()

    def lives(self, name: str, number: int, *processes: subprocess.Popen[str]) -> list[list[str]]:
        """Process id, node and first value of so many lives of a worker that runs `STEPS`, the newest last."""
        found: list[pathlib.Path] = []

        def are_there() -> bool:
            for process in processes:
                assert process.poll() is None, self.finish(process)[1]
            found[:] = sorted(self.folder.glob(f"{name}.*.here"), key=lambda path: path.stat().st_mtime)
            return len(found) >= number

        wait_until(are_there, f"{name} has not come {number} times")
        return [path.read_text().split() for path in found]

    def comes_back(self, name: str, before: int, process: subprocess.Popen[str]) -> list[str]:
        """Waits for the second life of a worker of `COUNTS`, and for steps of it: the job still has the samples that
        were counted before.
        """
        again = self.lives(name, 2, process)[-1]
        assert -float(again[2]) >= before > 0, "what was acknowledged is lost"
        self.goes_on(name)
        return again

    def goes_on(self, name: str) -> None:
        """Waits until this worker has made ten more of `STEPS`."""
        path = self.folder / f"at-{name}"

        def step() -> int:
            return int((path.read_text() if path.exists() else "") or 0)

        begun = step()
        wait_until(lambda: step() >= begun + 10, f"{name} makes no steps")

    def counted(self) -> int:
        """How many samples the newest lives of workers of `COUNTS` have seen acknowledged, at the least."""
        return 4 * sum(int(path.read_text() or 0) for path in self.folder.glob("at-worker-*"))

    def end_steps(self) -> None:
        (self.folder / "end").touch()

    def wait_for_save(self, name: str, *processes: subprocess.Popen[str]) -> None:
        """Waits until this folder has a whole checkpoint."""
        until = time.monotonic() + JOB_PATIENCE
        while not list((self.folder / name).glob(f"*/{MANIFEST}")):
            for process in processes:
                assert process.poll() is None, self.finish(process)[1]
            assert time.monotonic() < until, f"nothing was saved in {name}"
            time.sleep(0.05)

    def left(self) -> list[str]:
        """The command lines of processes that run in this folder."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and pathlib.Path(os.readlink(entry / "cwd")) == self.folder:
                    words = (entry / "cmdline").read_bytes().decode().split("\0")
                    found += [" ".join(words)] if words != [""] else []
            except OSError:
                continue
        return found

    def check_secrets(self, *shown: str) -> None:
        """While a job runs: no process of this machine has a secret of it in its command line or its environment, and
        none is in what was shown. The files with one are for their user only.
        """
        files = [*self.folder.glob(f"runs/*/{JOB_FILE}"), *self.folder.glob(f"runs/.slurm-*/{MEETING}")]
        tokens = list(self.cache.rglob("*.token"))
        secrets = {jobfile.read(path).token for path in files} | {path.read_text() for path in tokens}
        assert secrets and min(map(len, secrets)) >= 32
        assert [path for path in (*files, *tokens) if path.stat().st_mode & 0o077] == []
        told = {"what was shown": "\n".join(shown)}
        for entry in pathlib.Path("/proc").iterdir():
            for name in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    if entry.name.isdigit():
                        told[f"{name} of {entry.name}"] = (entry / name).read_text(errors="replace")
        assert len(told) > 4
        assert [where for where, text in told.items() if any(secret in text for secret in secrets)] == []

    def members(self, name: str) -> list[int]:
        """The processes of this member that run in this folder."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
                if name in words and pathlib.Path(os.readlink(entry / "cwd")) == self.folder:
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def num_workers(self) -> int:
        """How many workers run in this folder."""
        return sum(bool(self.members(f"worker-{rank}")) for rank in range(16))

    def check_nothing_left(self) -> None:
        until = time.monotonic() + PATIENCE
        while (left := [*self.left(), *map(str, self.cache.rglob("*.token"))]) and time.monotonic() < until:
            time.sleep(0.05)
        assert left == []

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        until = time.monotonic() + PATIENCE
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.05)
        assert left == []


def finished_well(output: str, ranks: int) -> bool:
    return re.search(rf"the job has finished: all {ranks} workers ended well", output) is not None


def counted_once(output: str) -> int:
    """The epochs that workers of `COUNTS` have read, each sample once in each of them."""
    found = [(int(least), int(most)) for least, most in re.findall(r"SEEN (\d+) to (\d+) times", output)]
    least, most = max(found)
    assert least == most == max(most for _, most in found) > 0, output
    return least


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Slurm with four nodes, for all tests of this run."""
    made = Cluster(tmp_path_factory.mktemp("slurm").resolve() / "cluster")
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def slurm(cluster: Cluster, tmp_path: pathlib.Path) -> Iterator[Engine]:
    """Commands of Slurm, in a folder of their own. All nodes are on this machine, and its loopback reaches them."""
    path = f"{BIN}:{cluster.environment['PATH']}"
    made = Engine(tmp_path.resolve(), {**cluster.environment, "PATH": path})
    made.settings('bind = "127.0.0.1"')
    made.leave_out_torch()
    try:
        yield made
    finally:
        cluster.cancel_all()
        made.close()


@pytest.fixture(scope="session")
def ray_hosts() -> Iterator[RayHosts]:
    """Ray with three hosts, for all tests of this run."""
    made = RayHosts()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def ray(ray_hosts: RayHosts, tmp_path: pathlib.Path) -> Iterator[Engine]:
    """Commands of the environment that has Ray, in a folder of their own."""
    path = f"{RAY_BIN}:{os.environ['PATH']}"
    made = Engine(tmp_path.resolve(), {"PATH": path, "RAY_ADDRESS": ray_hosts.address, **LOOPBACK})
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def engine(tmp_path: pathlib.Path) -> Iterator[Engine]:
    made = Engine(tmp_path.resolve())
    try:
        yield made
    finally:
        made.close()
