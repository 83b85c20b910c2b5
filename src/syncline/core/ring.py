"""Rings: every worker's process has a server with every slice. The settings that follow, and the exclusions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.core.codecs.named import NONE, Codecs
from syncline.core.codecs.pieces import SliceCoder, coder_of
from syncline.core.layout import Segment, Slice
from syncline.core.members import Member, by_name
from syncline.core.policy import parse_policy
from syncline.core.replica_sets import ReplicaSet, protection
from syncline.core.slice_state import Identity
from syncline.core.units import counted
from syncline.errors import ConfigError

#: The usual slice size on a GPU: nothing is spread over cores, and every slice costs time.
NCCL_SLICE_BYTES, _USUAL_BYTES = 1 << 30, JobConfig().slice_bytes
#: Settings that follow from the number of workers in a ring.
_FOLLOWS = {"servers": "-s", "replicas": "--replicas", "ack": "--ack"}


def partner_of(name: str) -> str:
    """The other member of the same process: server-3 for worker-3 and vice versa."""
    role, _, number = name.rpartition("-")
    return f"{'server' if role == 'worker' else 'worker'}-{number}"


def ring_settings(config: JobConfig) -> dict[str, Any]:
    """The settings that follow in a ring from its number of workers: as many servers, each with every slice."""
    large = {"slice_bytes": NCCL_SLICE_BYTES} if config.sums == "nccl" and config.slice_bytes == _USUAL_BYTES else {}
    if max(config.workers, config.most_workers) < 2:
        return {"servers": 1, "replicas": 1, "ack": "memory", **large}
    return {"servers": config.workers, "replicas": max(2, config.workers), "ack": "replicated", **large}


def check_said(said: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings that follow from a ring but were given."""
    if said.get("exchange") != "ring":
        return
    for key, option in _FOLLOWS.items():
        if key in said:
            raise ConfigError(
                f"--exchange ring and {option} {said[key]} cannot be combined: every worker's process has a server, "
                f"which has every slice; leave {option} out (also in syncline.toml: {key}), or use "
                "--exchange servers"
            )


def check_ring(config: JobConfig) -> None:
    """Raises ConfigError for what a ring cannot do, with the alternative."""
    if not config.is_ring:
        if config.sums != "ours":
            raise ConfigError(
                f"--sums {config.sums} is for rings: servers add up gradients themselves; use --exchange ring, or "
                "leave --sums out"
            )
        return
    _check_process_group(config)
    policy = parse_policy(config.policy)
    if not policy.in_rounds or policy.has_spare:
        raise ConfigError(
            f"--exchange ring and --policy {policy} cannot be combined: in a ring every round is that of all "
            "workers; use --policy sync, or --exchange servers"
        )
    if config.window:
        raise ConfigError(
            f"--exchange ring and --window {config.window} cannot be combined: in a ring a worker has one open "
            "clock; leave --window out, or use --exchange servers with --policy bounded:K or async"
        )
    if config.server_device != "cpu":
        raise ConfigError(
            f"--exchange ring and --server-device {config.server_device} cannot be combined: so far a ring's servers "
            "have their slices in host memory, or with --sums nccl on their worker's GPU; leave --server-device out, "
            "or use --exchange servers"
        )


def _check_process_group(config: JobConfig) -> None:
    for option, name in (("--codec", config.codec), ("--pull-codec", config.pull_codec)):
        if config.has_process_group and name not in NONE:
            raise ConfigError(
                f"--sums {config.sums} and {option} {name} cannot be combined: {config.sums} carries gradients as "
                f"they are; leave {option} out, or use --sums ours"
            )
    if config.sums == "nccl" and config.device != "auto" and not config.device.startswith("cuda"):
        raise ConfigError(
            f"--sums nccl and --device {config.device} cannot be combined: nccl is for GPUs; use --sums gloo"
        )


def check_process_group_hosts(config: JobConfig, hosts: Iterable[str]) -> None:
    """Raises ConfigError if gloo or nccl would connect several hosts without --trust-network. `hosts`: of each
    server.
    """
    found = sorted(set(hosts))
    if config.has_process_group and len(found) > 1 and not config.trust_network:
        raise ConfigError(
            f"--sums {config.sums} between hosts ({', '.join(found)}): {config.sums} does not encrypt, and accepts "
            "any connection; use --trust-network if you trust the network, or --sums ours, which encrypts"
        )


def trust_told(config: JobConfig, hosts: Iterable[str]) -> str:
    """What --trust-network allows in this job, if it matters. `hosts`: of each server."""
    found = sorted(set(hosts))
    if not config.has_process_group or len(found) < 2:
        return ""
    return (
        f"--trust-network: {config.sums} speaks between {', '.join(found)} in the clear, and to anyone who connects"
    )


def check_process_group_gpus(config: JobConfig, num_workers: int, num_gpus: int, where: str = "this machine") -> None:
    """Raises ConfigError if workers of one host would share a GPU."""
    if config.sums == "nccl" and num_gpus < num_workers:
        raise ConfigError(
            f"--sums nccl needs a GPU for every worker; {where} has {counted(num_gpus, 'GPU')} for "
            f"{counted(num_workers, 'worker')}: use --sums gloo, or leave --sums out"
        )


def protection_of(config: JobConfig, hosts: Iterable[str], replica_sets: Collection[ReplicaSet] = ()) -> str:
    """What a death would cost, in either exchange. `hosts`: of each server; `replica_sets`: the current ones."""
    hosts = list(hosts)
    if not config.is_ring:
        return protection(config.replicas, hosts, replica_sets)
    if len(hosts) < 2:
        return "no other process has a copy of the model: if the worker dies, training restarts from a checkpoint"
    alone = sum(not replica_set.backups for replica_set in replica_sets)
    if alone:
        return f"{alone} of {counted(len(replica_sets), 'slice')} are in one process only now; its death loses them"
    if len(set(hosts)) > 1:
        return "survives the death of all workers but one; the loss of a whole host can tear one step"
    return "survives the death of all workers but one, but not of this host: all workers are on it"


class Ballot(msgspec.Struct, frozen=True, array_like=True):
    """A round that is voted on: the generation of the replica sets, and one of its commits, which identifies it."""

    generation: int
    worker: str
    incarnation: int
    clock: int


def ballot_of(generation: int, commits: Iterable[tuple[str, int, int]]) -> Ballot:
    return Ballot(generation, *min(commits))


class Votes:
    """The votes known to one server."""

    def __init__(self) -> None:
        self.generation = 0
        self.voters: frozenset[str] = frozenset()
        self._votes: dict[Ballot, set[str]] = {}

    def begin(self, generation: int, voters: Collection[str]) -> None:
        """Replica sets have changed: drops earlier votes. Other servers may have begun before us."""
        self.generation, self.voters = generation, frozenset(voters)
        self._votes = {ballot: votes for ballot, votes in self._votes.items() if ballot.generation >= generation}

    def vote(self, ballot: Ballot, server: str) -> None:
        """Adds a vote. Idempotent; votes of past generations do not count."""
        if ballot.generation >= self.generation:
            self._votes.setdefault(ballot, set()).add(server)

    def missing(self, ballot: Ballot) -> list[str]:
        """The servers that have not voted."""
        return sorted(self.voters - self._votes.get(ballot, set()))

    def is_decided(self, ballot: Ballot) -> bool:
        return ballot.generation == self.generation and self.voters <= self._votes.get(ballot, set())

    def forget(self, ballot: Ballot) -> None:
        self._votes.pop(ballot, None)


def settled_by(held: Iterable[Mapping[Identity, int]]) -> dict[Identity, int]:
    """Every worker's clock up to which commits count, from what each survivor has applied or holds."""
    answers = list(held)
    workers = {worker for answer in answers for worker in answer}
    return {worker: min(answer.get(worker, 0) for answer in answers) for worker in workers}


class Spread:
    """Which slices of a job are spread."""

    def __init__(self, config: JobConfig, codecs: Codecs) -> None:
        self._is_ring, self._is_tcp = config.is_ring and not config.has_process_group, config.transport == "tcp"
        self._push, self.sums = (coder_of(codec, codecs) for codec in (codecs.push, codecs.pull))

    def of(
        self, parts: Iterable[tuple[Segment, Slice]], replica_sets: Mapping[int, ReplicaSet], hosts: Mapping[str, str]
    ) -> frozenset[int]:
        """The spread slices. `hosts`: of the servers, by name."""
        if not self._is_ring:  # with a process group every server computes all sums anyway
            return frozenset()
        return frozenset(part.id for segment, part in parts if self._is_spread(segment, part, replica_sets, hosts))

    def _is_spread(
        self, segment: Segment, part: Slice, replica_sets: Mapping[int, ReplicaSet], hosts: Mapping[str, str]
    ) -> bool:
        replica_set = replica_sets.get(part.id)
        if replica_set is None or not replica_set.primary or not replica_set.backups:
            return False
        if not self._is_tcp and len({hosts.get(name) for name in replica_set.names}) == 1:
            return False  # they read each other's memory
        most = len(replica_set.backups) * _num_bytes(self._push, segment, part)
        return most <= _num_bytes(self.sums, segment, part)


def _num_bytes(coder: SliceCoder | None, segment: Segment, part: Slice) -> int:
    """The maximal size of a push or sum of this slice."""
    return part.num_bytes if coder is None else coder.bound(segment, part)


class HostLeaders:
    """The host leaders of one generation."""

    def __init__(self, replica_sets: Mapping[int, ReplicaSet], hosts: Mapping[str, str]) -> None:
        """`hosts`: of the servers, by name."""
        self._replica_sets, self._hosts = replica_sets, hosts
        self._known: dict[int, dict[str, str]] = {}

    def host_of(self, name: str) -> str:
        """The host of a server, or of a worker by its server; "" if it is in no replica set."""
        return self._hosts.get(name if name in self._hosts else partner_of(name), "")

    def of(self, number: int) -> dict[str, str]:
        """The host leader of each host for this slice, ordered by host."""
        found = self._known.get(number)
        if found is None:
            replica_set = self._replica_sets.get(number)
            found = self._known[number] = (
                _host_leaders(replica_set, self._hosts) if replica_set is not None and replica_set.primary else {}
            )
        return found

    def primary(self, number: int) -> str:
        replica_set = self._replica_sets.get(number)
        return replica_set.primary if replica_set is not None else ""

    def carries(self, sender: str, number: int, to: str) -> bool:
        """Whether `sender` sends `to` its host's sum of a slice: a host leader to the primary."""
        host = self.host_of(sender)
        return self.primary(number) == to and host != self.host_of(to) and self.of(number).get(host) == sender

    def gives(self, sender: str, number: int, to: str) -> bool:
        """Whether `sender` sends `to` the total: the primary to a host leader, a host leader to its local peers."""
        host_leader, primary = self.of(number).get(self.host_of(to)), self.primary(number)
        return to not in ("", primary) and sender == (primary if host_leader == to else host_leader)

    def local_peers(self, name: str) -> list[str]:
        """The other servers on its host."""
        host = self._hosts[name]
        return sorted((other for other, where in self._hosts.items() if where == host and other != name), key=by_name)


def host_leaders_of(
    config: JobConfig, replica_sets: Mapping[int, ReplicaSet], members: Iterable[Member]
) -> HostLeaders | None:
    """None if sums go directly to the primary: with one worker, with two on two hosts, on one host without spare
    cores, without shared memory, with a codec, or with a process group. All members decide the same from the
    replica sets and the roster.
    """
    codecs = (config.codec, config.pull_codec)
    if (
        not config.is_ring
        or config.has_process_group
        or config.transport == "tcp"
        or any(c not in NONE for c in codecs)
    ):
        return None
    names = {name for replica_set in replica_sets.values() for name in replica_set.names}
    seated = {member.name: member for member in members if member.name in names}
    hosts = {name: seated[name].host if name in seated else "" for name in names}
    num_hosts = len(set(hosts.values()))
    if len(names) <= num_hosts <= 2 or (num_hosts == 1 and not _have_cores_to_spare(seated.values())):
        return None
    return HostLeaders(replica_sets, hosts)


def _have_cores_to_spare(seated: Collection[Member]) -> bool:
    """Whether idle cores can make sums during backward: two cores per process on one host. With fewer, sums and
    backward would take turns, and direct sums are less work.
    """
    return all(member.num_cores >= (2 if member.cores else 2 * len(seated)) for member in seated)


def _host_leaders(replica_set: ReplicaSet, hosts: Mapping[str, str]) -> dict[str, str]:
    by_host: dict[str, list[str]] = {}
    for name in sorted(replica_set.names, key=by_name):
        by_host.setdefault(hosts.get(name, ""), []).append(name)
    # As balanced as the primaries, whatever the number of workers per host: by the primary's index on its host, in
    # turn.
    turn = by_host[hosts.get(replica_set.primary, "")].index(replica_set.primary) + replica_set.slice // len(
        replica_set.names
    )
    found = {host: names[turn % len(names)] for host, names in sorted(by_host.items())}
    return {**found, hosts.get(replica_set.primary, ""): replica_set.primary}
