"""The checks of `syncline doctor --on ENGINE`: whether an engine is here, runs, and can start a job."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from syncline import config as configuration
from syncline.cli.checks import Check, Finding
from syncline.core.units import counted
from syncline.engines import ray_cluster
from syncline.errors import ConfigError, SynclineError
from syncline.launch.greeting import greet
from syncline.launch.hosts import parse_hosts
from syncline.launch.processes import LOCAL_HOSTS, command_on
from syncline.launch.rendezvous import HOW, own_token_path, read_token
from syncline.launch.versions import InstalledVersions, differing, torch_told, versions_here
from syncline.launch.world import StartedRanks

#: For one process that an engine starts.
TRY_SECONDS = 60.0
_MPI = ("mpirun", "mpiexec.hydra", "mpiexec")


def mpi() -> Finding:
    """The first of the commands that MPI implementations have."""
    path = next((found for name in _MPI if (found := shutil.which(name))), None)
    if path is None:
        remedy = "install Open MPI or MPICH (Debian: openmpi-bin or mpich), or load your cluster's module"
        return Finding("problem", f"there is no {' or '.join(_MPI)}", remedy)
    version = _run([path, "--version"])
    return Finding("ok", f"{path}: {(version.stdout or version.stderr).strip().partition(chr(10))[0]}")


def mpi_starts() -> Finding:
    """One process; as root Open MPI wants to be told twice."""
    path = next((found for name in _MPI if (found := shutil.which(name))), None)
    if path is None:
        return Finding("problem", "nothing to try", "install MPI first")
    return _tried([path, "-n", "1", sys.executable, "-c", "pass"])


def torchrun() -> Finding:
    if importlib.util.find_spec("torch") is None:
        remedy = "pip install 'syncline[torch]'"
        return Finding("problem", "torch is not installed, and torchrun comes with it", remedy)
    module = importlib.import_module("torch")
    return Finding("ok", f"of torch {module.__version__}")


def torchrun_starts() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("problem", "nothing to try", "install torch first")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    return _tried([*command, "--no-python", sys.executable, "-c", "pass"])


def token() -> Finding:
    """Ranks on several hosts need it; ranks on this one make their own."""
    path = configuration.token_file()
    if path:
        try:
            read_token(pathlib.Path(path))
        except SynclineError as error:
            return Finding("problem", str(error), "correct what this names")
        return Finding("ok", f"SYNCLINE_TOKEN_FILE: {path}")
    own = own_token_path(StartedRanks(launcher="doctor", rank=0, size=1)).parent
    return Finding("ok", f"ranks on one host make their own in {own}; several hosts need SYNCLINE_TOKEN_FILE: {HOW}")


def slurm() -> Finding:
    """Slurm's commands, which login nodes and compute nodes have."""
    missing = [name for name in ("srun", "sbatch", "squeue", "scontrol", "scancel") if shutil.which(name) is None]
    if missing:
        remedy = "run this on a login node of the cluster, or load its module"
        return Finding("problem", f"there is no {', '.join(missing)}", remedy)
    try:
        return Finding("ok", _run(["srun", "--version"]).stdout.strip())
    except subprocess.TimeoutExpired:  # without a configuration it asks the network for one
        remedy = "say which cluster: SLURM_CONF, or SLURM_CONF_SERVER"
        return Finding("problem", f"srun did not answer within {TRY_SECONDS:g} s", remedy)


def slurm_answers() -> Finding:
    """The controller, and what its partitions have."""
    if shutil.which("sinfo") is None:
        return Finding("problem", "nothing to ask", "install Slurm's commands first")
    try:
        done = _run(["sinfo", "--noheader", "--format=%P: %D nodes, %a, %c cores, gres %G, limit %l"])
    except subprocess.TimeoutExpired:
        remedy = "ask the cluster's administrators; scontrol ping says which controller is down"
        return Finding("problem", f"the controller did not answer within {TRY_SECONDS:g} s", remedy)
    if done.returncode:
        return Finding("problem", done.stderr.strip()[:300], "correct what this names; SLURM_CONF says which cluster")
    return Finding("ok", "; ".join(" ".join(line.split()) for line in done.stdout.splitlines()[:8]))


def shared_folder() -> Finding:
    """Whether other hosts may see the working folder: the kind of its disk."""
    here = pathlib.Path.cwd()
    kind = _run(["stat", "--file-system", "--format=%T", str(here)]).stdout.strip()
    if kind in _OWN_DISKS:
        remedy = "start jobs in a folder on a disk that all nodes share, or use the same paths and data on each node"
        return Finding("warning", f"{here} is on a disk of this host ({kind})", remedy)
    return Finding("ok", f"{here} ({kind or 'kind unknown'})")


def ray() -> Finding:
    return Finding("ok", f"Ray {ray_cluster.ray_module().__version__}")


def ray_answers() -> Finding:
    """The cluster, and what it has in all and now."""
    with ray_cluster.connected():
        free, totals = ray_cluster.free(), ray_cluster.totals()
        has = ray_cluster.told({name: totals.get(name, 0.0) for name in ("CPU", "GPU")})
        left = ray_cluster.told({name: free.get(name, 0.0) for name in ("CPU", "GPU")})
        return Finding("ok", f"{counted(len(ray_cluster.host_names()), 'host')}: {has}; {left} are free")


def ray_hosts() -> Finding:
    """Each host: whether it starts a process, with our versions, and sees this folder."""
    with ray_cluster.connected(), tempfile.NamedTemporaryFile(dir=pathlib.Path.cwd(), prefix=".syncline-") as mark:
        found = ray_cluster.looked_at(look_from_ray, mark.name, TRY_SECONDS)
    here, copies = versions_here(), []
    for host, answer in found.items():
        if isinstance(answer, str):
            return Finding("problem", f"{host}: {answer}", "correct what this names; ray logs has Ray's own words")
        versions, sees = answer
        if trouble := differing(versions, here, host):
            return Finding("problem", trouble, "give all hosts the same environment")
        if told := torch_told(versions, here, host):
            return Finding("warning", told, "install one version of torch everywhere")
        copies += [] if sees else [host]
    folder = f"; {', '.join(copies)} would get a copy of this folder" if copies else "; all see this folder"
    return Finding("ok", f"{', '.join(found)}: the same versions as here{folder}")


def look_from_ray(mark: str) -> tuple[InstalledVersions, bool]:
    return versions_here(), pathlib.Path(mark).exists()


def kubectl() -> Finding:
    path = shutil.which("kubectl")
    if path is None:
        return Finding("warning", "there is no kubectl", "install it; syncline manifest itself does without")
    return Finding("ok", path)


def cluster_answers() -> Finding:
    """The API server, and whether it knows JobSets."""
    if shutil.which("kubectl") is None:
        return Finding("warning", "nothing to ask with", "install kubectl first")
    try:
        done = _run(["kubectl", "api-resources", "--api-group=jobset.x-k8s.io", "--output=name"])
    except subprocess.TimeoutExpired:
        return Finding("problem", f"the cluster did not answer within {TRY_SECONDS:g} s", "see kubectl cluster-info")
    if done.returncode:
        return Finding("problem", done.stderr.strip()[:300], "correct what this names; see kubectl cluster-info")
    if "jobsets" not in done.stdout:
        return Finding("warning", "the cluster knows no JobSets", "use syncline manifest --plain, or install JobSet")
    return Finding("ok", "the cluster answers, and knows JobSets")


def prefix(remote: str) -> Finding:
    """The command that `-H` starts others with."""
    name = shlex.split(remote)[0] if remote.strip() else ""
    path = shutil.which(name)
    if path is None:
        return Finding("problem", f"there is no {name or 'command'}", "install it, or give another prefix: --remote")
    return Finding("ok", f"{path}: {remote}")


def host_answers(host: str, remote: str) -> Finding:
    """One host: whether a command starts there, and what it has."""
    try:
        told = greet([host], remote, "", TRY_SECONDS)
    except SynclineError as error:
        remedy = f"try {shlex.join(command_on(host, remote, [sys.executable, '--version']))}"
        return Finding("problem", str(error), remedy)
    if told:
        return Finding("warning", told[0], "install one version of torch everywhere")
    here = "this host" if host in LOCAL_HOSTS else "starts a process, with the same versions as here"
    return Finding("ok", here)


def host_checks(hosts: str, remote: str) -> tuple[Check, ...]:
    """Of the hosts of `-H`, or only of the prefix that reaches them."""
    names = [host for host, _ in parse_hosts(hosts)] if hosts else []
    looks = [Check(host, functools.partial(host_answers, host, remote)) for host in names]
    return (Check("command", functools.partial(prefix, remote)), *looks, Check("folder", shared_folder))


def _tried(command: list[str]) -> Finding:
    try:
        done = _run(command)
    except subprocess.TimeoutExpired:
        return Finding("problem", f"{command[0]} did not start a process within {TRY_SECONDS:g} s", "see its manual")
    if done.returncode == 0:
        return Finding("ok", "starts a process here")
    said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip(" -")]
    return Finding("problem", f"exit code {done.returncode}: {' '.join(said[:3])[:300]}", "correct what this names")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TRY_SECONDS, stdin=subprocess.DEVNULL, check=False
    )


_OWN_DISKS = frozenset({"ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs", "zfs", "ramfs"})
#: By the engine's name.
ENGINES: Mapping[str, tuple[Check, ...]] = {
    "mpi": (Check("mpirun", mpi), Check("a process", mpi_starts), Check("token", token)),
    "torchrun": (Check("torchrun", torchrun), Check("a process", torchrun_starts), Check("token", token)),
    "slurm": (Check("Slurm", slurm), Check("the cluster", slurm_answers), Check("working folder", shared_folder)),
    "ray": (Check("Ray", ray), Check("the cluster", ray_answers), Check("its hosts", ray_hosts)),
    "kubernetes": (Check("kubectl", kubectl), Check("the cluster", cluster_answers)),
}


def checks_of(engine: str) -> tuple[Check, ...]:
    if engine not in ENGINES:
        raise ConfigError(f"--on {engine}: must be one of {', '.join(ENGINES)}, ssh")
    return ENGINES[engine]
