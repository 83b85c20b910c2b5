"""A Ray cluster of three hosts on this machine, for all tests of a run, and commands that run jobs there."""

from __future__ import annotations

import os
import pathlib
import subprocess
import tempfile

import pytest

#: The commands of the environment that has Ray.
RAY_BIN = os.environ.get("SYNCLINE_TEST_RAY", str(pathlib.Path(__file__).parents[2] / ".venv-ray" / "bin"))

#: By default Ray would listen at this machine's own address.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
#: By default what Ray starts yields to all else on this machine, which may run other tests; and a host has half a
#: minute to start, whatever the machine does meanwhile.
_CLUSTER = {
    **LOOPBACK, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "60", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
}  # fmt: skip

#: The hosts, and the CPUs of each.
HOSTS, CPUS = ("h1", "h2", "h3"), 4


class RayHosts:
    """The cluster, in a process of its own."""

    def __init__(self, **environment: str) -> None:
        if not pathlib.Path(RAY_BIN, "syncline").exists():
            pytest.skip("there is no environment with Ray: make test-engines makes it")
        script = pathlib.Path(__file__).parent / "ray_hosts.py"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the cluster
        self._process = subprocess.Popen(
            [f"{RAY_BIN}/python", str(script), str(CPUS), *HOSTS],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True,
            env={**os.environ, **_CLUSTER, "PATH": f"{RAY_BIN}:{os.environ['PATH']}", **environment},
        )  # fmt: skip
        self.address, self.dashboard = self._said("address ").split()
        self.changed: dict[str, bool] = {}  # hosts that have come and gone: whether they are there

    def _said(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        self._errors.seek(0)
        raise AssertionError(f"the Ray cluster has ended: {self._errors.read()[-4000:]}")

    def _tell(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        self._said("done")

    def lose(self, host: str) -> None:
        self.changed[host] = False
        self._tell(f"lose {host}")

    def add(self, host: str, cpus: int = CPUS, gpus: int = 0, path: str = "") -> None:
        """`gpus`: as many as Ray is told, and hands out by their numbers. `path`: what is found first there."""
        self.changed[host] = True
        self._tell(f"add {host} {cpus} {gpus} {path}")

    def wait_for(self, number: int) -> None:
        """Until the cluster counts so many hosts: it notices a lost one after some seconds."""
        self._tell(f"wait {number}")

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()


def on_ray(*words: str) -> list[str]:
    return ["syncline", "run", "--on", "ray", "--page", "off", *words]
