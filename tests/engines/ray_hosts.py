"""A Ray cluster of several hosts on this machine, by the Python that has Ray: `python ray_hosts.py CPUS h1 h2 h3`.

It says its address and that of its dashboard, which takes submitted jobs. Then it reads commands from standard input:
`lose h2`, `add h2 CPUS GPUS [PYTHONPATH]`; at its end everything ends. All hosts have the address 127.0.0.1.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import sys
import time
from typing import Any

from ray.cluster_utils import Cluster

MEMORY = 100_000_000
TRIES = 5
_COMMON = {"node_ip_address": "127.0.0.1", "object_store_memory": MEMORY}


def below(parents: list[int]) -> list[int]:
    """The processes that these have started, and theirs."""
    above = {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                above[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    found, todo = [], list(parents)
    while todo:
        parent = todo.pop()
        children = [pid for pid, its in above.items() if its == parent]
        found += children
        todo += children
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _begun(first: dict[str, Any]) -> Cluster:
    """The cluster with its first host."""
    for number in range(TRIES):
        before = below([os.getpid()])
        try:
            return Cluster(initialize_head=True, connect=False, head_node_args=first)
        except Exception:
            kill([pid for pid in below([os.getpid()]) if pid not in before])
            if number == TRIES - 1:
                raise
    raise AssertionError


class Hosts:
    def __init__(self, names: list[str], cpus: float) -> None:
        first = {**_COMMON, "node_name": names[0], "num_cpus": cpus}
        first |= {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": free_port()}
        self._cluster = _begun(first)
        self._there = {names[0]: self._cluster.head_node}
        for name in names[1:]:
            self.add(name, cpus)
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def dashboard(self) -> str:
        return f"http://{self._cluster.head_node.webui_url}"

    def add(self, name: str, cpus: float, gpus: int = 0, path: str = "") -> None:
        """Ray gives a host 30 seconds to start, whatever this machine does meanwhile: then it starts again."""
        more = {
            "node_name": name,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "env_vars": {"PYTHONPATH": path} if path else None,
        }
        for number in range(TRIES):
            before = below([os.getpid()])
            try:
                self._there[name] = self._cluster.add_node(**_COMMON, **more, wait=False)
                return
            except Exception:
                kill([pid for pid in below([os.getpid()]) if pid not in before])
                if number == TRIES - 1:
                    raise

    def lose(self, name: str) -> None:
        """The host is gone at once, with all that runs there."""
        host = self._there.pop(name)
        own = [info.process.pid for infos in host.all_processes.values() for info in infos]
        kill([*own, *below(own)])
        self._cluster.remove_node(host, allow_graceful=False)

    def wait_for(self, number: int) -> None:
        """Until the cluster counts so many hosts."""
        while len(self._cluster.global_state._live_node_ids()) != number:
            time.sleep(0.2)

    def close(self) -> None:
        own = below([os.getpid()])
        self._cluster.shutdown()
        kill(own)


def main() -> None:
    hosts = Hosts(sys.argv[2:], float(sys.argv[1]))
    print(f"address {hosts.address} {hosts.dashboard}", flush=True)
    try:
        for line in sys.stdin:
            command, *words = line.split()
            if command == "lose":
                hosts.lose(words[0])
            elif command == "wait":
                hosts.wait_for(int(words[0]))
            else:
                hosts.add(words[0], float(words[1]), int(words[2]), " ".join(words[3:]))
            print("done", flush=True)
    finally:
        hosts.close()


if __name__ == "__main__":
    main()
