"""A Ray cluster as a job sees it: its hosts, what they have, and room for each member."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import logging
import pathlib
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.core.units import counted
from syncline.errors import ConfigError
from syncline.launch.processes import LOCAL_HOSTS
from syncline.launch.versions import InstalledVersions

#: For a connection to the cluster's head, before Ray itself waits for it much longer.
REACH_SECONDS = 5.0
#: Between two looks at room that Ray makes; after so long, a line says what is missing.
_LOOK_SECONDS, _PATIENT_SECONDS = 0.2, 5.0
#: For room that a job can begin without.
_SOON_SECONDS = 2.0
#: The label by which Ray knows each host.
HOST_LABEL = "ray.io/node-id"
#: Set by `ray job submit`: the runtime environment of the submitted job, as JSON.
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: Never part of the working folder on other hosts.
_LEFT_OUT = (".git", ".venv*", "__pycache__", "*.pyc", ".mypy_cache", ".pytest_cache", ".ruff_cache", "node_modules")


#: What a server needs.
SERVER: Mapping[str, float] = {"CPU": 1.0}


class EachWorker(msgspec.Struct, frozen=True, kw_only=True):
    """What each worker needs."""

    cpus_per_worker: float = 1.0
    gpus_per_worker: float = -1.0  #: -1: one if the cluster has any, else none

    def check(self) -> None:
        if not 0 < self.cpus_per_worker <= 65_536 or not -1 <= self.gpus_per_worker <= 1024:
            raise ConfigError("--cpus-per-worker must be above 0, --gpus-per-worker 0 or more")


@dataclasses.dataclass(eq=False)
class Room:
    """Room for one member: a bundle of a placement group. When its host is lost, Ray moves it to another one."""

    role: str
    group: Any  # Ray's PlacementGroup
    index: int  # of the bundle in it
    bundle: Mapping[str, float]
    host: str = ""  # where it is, as far as is known
    is_single: bool = False  # alone in its group: Ray can have it back alone


def ray_module() -> Any:
    """Ray, which only jobs on Ray import."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError("--on ray needs Ray: pip install 'syncline[ray]'") from None


@contextlib.contextmanager
def connected(left_out: Sequence[str] | None = None) -> Iterator[None]:
    """This process is a driver of the cluster. `left_out`: other hosts get the working folder, but for this."""
    ray = ray_module()
    if ray.is_initialized():  # by the program that runs this job
        yield
        return
    environment = configuration.inherited_environment({})
    _check_reachable(environment.get("RAY_ADDRESS", ""))
    has_folder = b'"working_dir"' in environment.get(_SUBMITTED, "").encode()
    folder: dict[str, Any] = {}
    if left_out is not None and not has_folder:
        folder = {"working_dir": str(pathlib.Path.cwd()), "excludes": [*_LEFT_OUT, *left_out]}
    try:
        ray.init(address="auto", runtime_env=folder or None, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster: {_first(error)}; start one with ray start --head, or say where one is: "
            "RAY_ADDRESS=HOST:6379"
        ) from None
    except (RuntimeError, ValueError, OSError) as error:  # another Ray or Python there, a folder too large, …
        raise ConfigError(f"Ray does not take the job: {_first(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Named at once; Ray would wait a minute, or end the process."""
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS={address}: a launcher cannot run outside of the cluster; use ray job submit, or run it on "
            "a host of the cluster with RAY_ADDRESS=HOST:6379"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # auto, or empty: Ray finds the cluster of this host
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"RAY_ADDRESS={address}: no Ray cluster is there: {error}; is ray start running?") from None


def _first(error: Exception) -> str:
    """Ray's own words, without what follows the first paragraph."""
    return " ".join(str(error).strip().partition("\n\n")[0].split())[:400].rstrip(".")


def host_names() -> dict[str, str]:
    """The hosts that live: Ray's id of each, and its name; hosts of one name are told apart by their ids."""
    hosts = _hosts()
    there = {one["NodeID"]: str(one.get("NodeName") or one["NodeManagerAddress"]) for one in hosts}
    hostnames = {one["NodeID"]: str(one["NodeManagerHostname"]) for one in hosts}
    there = {key: hostnames[key] if name in LOCAL_HOSTS else name for key, name in there.items()}
    times = collections.Counter(there.values())
    return {key: name if times[name] == 1 else f"{name}-{key[:6]}" for key, name in there.items()}


def own_address() -> str:
    """Where the other hosts of the cluster reach this one; loopback where they are all on this machine."""
    ray = ray_module()
    mine = str(ray.util.get_node_ip_address())
    return "127.0.0.1" if {one["NodeManagerAddress"] for one in _hosts()} == {mine} else mine


def totals() -> dict[str, float]:
    """What the cluster has, in use or not."""
    found: dict[str, float] = collections.defaultdict(float)
    for one in _hosts():
        for name, number in one["Resources"].items():
            found[name] += number
    return found


def free() -> dict[str, float]:
    """What of this is not in use."""
    return dict(ray_module().available_resources())


def _hosts() -> list[dict[str, Any]]:
    return [one for one in ray_module().nodes() if one["Alive"]]


def bundle_of(wanted: EachWorker, processes: int) -> dict[str, float]:
    """What a worker needs, which may be a pipeline of several processes."""
    gpus = wanted.gpus_per_worker if wanted.gpus_per_worker >= 0 else float(totals().get("GPU", 0) > 0)
    bundle = {"CPU": wanted.cpus_per_worker * processes, "GPU": gpus * processes}
    return {name: number for name, number in bundle.items() if number}


def num_that_fit(bundle: Mapping[str, float], *, besides: int) -> int:
    """How many such workers have room now, beside so many servers."""
    left = free()
    left["CPU"] = left.get("CPU", 0.0) - besides * SERVER["CPU"]
    return max(0, int(min(left.get(name, 0.0) // number for name, number in bundle.items())))


def num_on(key: str, bundle: Mapping[str, float]) -> int:
    """How many such members a host has room for, with nothing else on it. `key`: Ray's id of the host."""
    has: Mapping[str, float] = next((one["Resources"] for one in _hosts() if one["NodeID"] == key), {})
    return int(min((has.get(name, 0.0) // number for name, number in bundle.items()), default=0))


def check_has(bundles: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Names what the cluster does not have, even with nothing else running: waiting would be in vain."""
    there = _hosts()
    needs: dict[str, float] = collections.defaultdict(float)
    for role, bundle in ((role, bundle) for role, ones in bundles.items() for bundle in ones):
        if not any(all(one["Resources"].get(name, 0) >= number for name, number in bundle.items()) for one in there):
            raise ConfigError(f"no host of the Ray cluster has {told(bundle)}, which a {role} needs; {_remedy()}")
        for name, number in bundle.items():
            needs[name] += number
    has = totals()
    if any(has.get(name, 0) < number for name, number in needs.items()):
        members = " and ".join(counted(len(ones), role) for role, ones in bundles.items() if ones)
        raise ConfigError(
            f"{members} need {told(needs)}; the Ray cluster has {told({name: has.get(name, 0) for name in needs})} "
            f"on {counted(len(there), 'host')}; {_remedy()}"
        )


def _remedy() -> str:
    return "use smaller numbers (-w, -s, --cpus-per-worker, --gpus-per-worker), or wait for more with --queue-seconds"


def told(bundle: Mapping[str, float]) -> str:
    """`2 CPUs and 1 GPU`"""
    return " and ".join(
        f"{number:g} {name}{'s' if number != 1 and name in ('CPU', 'GPU') else ''}" for name, number in bundle.items()
    )


def reserve(
    role: str, bundles: Sequence[Mapping[str, float]], strategy: str, avoided: Collection[str] = ()
) -> list[Room]:
    """Asks Ray for room, all of it or none; it is there once `wait_for_room` says so. `avoided`: Ray's ids of hosts
    that it is not on.
    """
    ray_module()
    groups = importlib.import_module("ray.util.placement_group")
    where = [{HOST_LABEL: f"!in({','.join(sorted(avoided))})"}] * len(bundles)
    elsewhere = {"bundle_label_selector": where} if avoided else {}
    group = groups.placement_group([dict(bundle) for bundle in bundles], strategy, **elsewhere)
    return [Room(role, group, k, bundle, is_single=len(bundles) == 1) for k, bundle in enumerate(bundles)]


def reserve_as_many(role: str, bundles: Sequence[Mapping[str, float]]) -> list[Room]:
    """Room for as many of these as there is room for now, each by itself, so that it can be given back by itself."""
    rooms = [reserve(role, [bundle], "PACK")[0] for bundle in bundles]
    until = time.monotonic() + _SOON_SECONDS
    there = [room for room in rooms if find([room], max(_LOOK_SECONDS, until - time.monotonic()))]
    release([room for room in rooms if room not in there])
    return there


def find(rooms: Sequence[Room], seconds: float = 0.0) -> bool:
    """Whether all of them are there now, or within so many seconds; then their hosts are known."""
    if not all(room.group.wait(seconds) for room in rooms if room.index == 0):
        return False
    names = host_names()
    table = importlib.import_module("ray.util.placement_group").placement_group_table
    for group in {room.group for room in rooms}:
        where = table(group).get("bundles_to_node_id", {})
        for room in rooms:
            if room.group == group:
                room.host = names.get(where.get(room.index, ""), "")
    return all(room.host for room in rooms)


def host_key_of(room: Room) -> str:
    """Ray's id of the host that this room is on; empty: there is none now."""
    table = importlib.import_module("ray.util.placement_group").placement_group_table
    return str(table(room.group).get("bundles_to_node_id", {}).get(room.index, ""))


def wait_for_room(rooms: Sequence[Room], seconds: float, say: Callable[[str], None]) -> None:
    """Waits until all of it is there: other jobs may hold it."""
    begun, said = time.monotonic(), False
    while not find(rooms, _LOOK_SECONDS):
        waited = time.monotonic() - begun
        if waited > seconds:
            raise ConfigError(
                f"the job did not start within {seconds:g} s: it waits for {_missing(rooms)}; ray status shows what "
                "uses the rest; give it longer with --queue-seconds"
            )
        if waited > _PATIENT_SECONDS and not said:
            said = True
            say(f"waits for room on Ray: {_missing(rooms)}")


def _missing(rooms: Sequence[Room]) -> str:
    needs: dict[str, float] = collections.defaultdict(float)
    for room in rooms:
        for name, number in room.bundle.items():
            needs[name] += number
    left = free()
    return f"{told(needs)}; free are {told({name: left.get(name, 0.0) for name in needs})}"


def looked_at(look: Callable[[str], tuple[InstalledVersions, bool]], mark: str, seconds: float) -> dict[str, Any]:
    """What this function finds on each host, by the host's name; an error in words, where Ray could not run it."""
    ray, strategies = ray_module(), importlib.import_module("ray.util.scheduling_strategies")
    task, names = ray.remote(look), host_names()
    refs = {
        task.options(
            num_cpus=0, scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(key, soft=False)
        ).remote(mark): name for key, name in names.items()
    }  # fmt: skip
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=seconds)
    found: dict[str, Any] = dict.fromkeys(names.values(), f"did not start a process within {seconds:g} s")
    for ref in done:
        try:
            found[refs[ref]] = ray.get(ref)
        except Exception as error:
            found[refs[ref]] = last_line(error)
    return found


def last_line(error: Exception) -> str:
    """The last line of Ray's long words: the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def release(rooms: Sequence[Room]) -> list[Room]:
    """Gives room back; Ray ends what runs there. Returns what Ray did not take, as while its head is away."""
    remove = importlib.import_module("ray.util.placement_group").remove_placement_group
    kept = []
    for group in {room.group for room in rooms}:
        try:
            remove(group)
        except Exception:  # the cluster may be gone
            kept += [room for room in rooms if room.group == group]
    return kept
