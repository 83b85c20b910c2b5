"""What a seed makes of a job: its shape, what its workers do, and what happens to it."""

from __future__ import annotations

import dataclasses

from syncline.core.leasing.loader import Loader

from .world import draw


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that goes wrong, when, to whom, for how long."""

    number: int
    when: float
    kind: str
    who: float  # which of those who are there then
    whom: float
    seconds: float
    flag: bool


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One job."""

    seed: int
    policy: str
    replicas: int
    servers: int
    workers: int
    window: int
    slices: int
    pull_every: int
    hold_seconds: float  # how long servers hold: in some jobs hardly longer than a message may take
    scripts: dict[str, tuple[str, ...]]
    late_workers: dict[str, float]
    late_servers: dict[str, float]
    retires: dict[str, float]
    faults: tuple[Fault, ...]
    data: Loader | None = None  # that workers loop over
    epochs: int = 0
    saves: tuple[float, ...] = ()  # when somebody asks for one
    barrier_seconds: float = 0.6  # until a gate opens by itself: in some jobs hardly longer than a message may take

    is_ring: bool = False  # every worker's process has a server in it

    @property
    def is_even(self) -> bool:
        """Whether workers' clocks can be compared as they are."""
        plain = all(word == "step" for script in self.scripts.values() for word in script)
        return plain and not self.late_workers and not self.faults


#: Kinds of faults, as often as they are named here. Coordinators die by themselves and in the middle of a save.
KINDS = (
    "crash_worker", "crash_worker", "crash_worker", "crash_server", "crash_server", "crash_server",
    "crash_coordinator", "torn", "torn", "pause_worker", "pause_worker", "pause_server", "pause_coordinator",
    "second", "break", "break", "break", "wall", "wall", "wall", "replay", "replay", "full",
)  # fmt: skip


#: So many jobs read leases of samples; the others make steps by their scripts.
LEASED = 0.5
#: From this seed on, jobs that are saved.
SAVES = 2_000_000
#: From this seed on, as many jobs with spare workers, and mostly with several servers.
SPARE = 1_000_000
#: From this seed on, rings.
RING = 3_000_000


def scenario_of(seed: int, keep: frozenset[int] | None = None) -> Scenario:
    """`keep`: only these faults; the others stay as they are."""

    def number(least: int, most: int, *key: object) -> int:
        return least + int(draw(seed, "scenario", *key) * (most - least + 1))

    kind = draw(seed, "policy")
    policy = "sync" if kind < 0.45 else "async" if kind < 0.75 else f"bounded:{number(0, 3, 'bound')}"
    replicas = 2 if draw(seed, "replicas") < 0.65 else 1
    servers = number(2, 3, "servers") if replicas == 2 else number(1, 3, "servers")
    workers = number(1, 4, "workers")
    late = {f"worker-{workers}": 0.05 + draw(seed, "late") * 0.9} if draw(seed, "is late") < 0.3 else {}
    rests = number(3, 5, "rests") if draw(seed, "has rests") < 0.4 else 0
    has_barriers = rests and draw(seed, "barriers") < 0.4
    scripts = {}
    for k in range(workers + len(late)):
        words: list[str] = []
        for step in range(number(6, 13, "steps", k)):
            if rests and step and step % rests == 0:
                words.append("barrier" if has_barriers else "rest")
            words.append("step")
        scripts[f"worker-{k}"] = tuple(words)
    late_servers = {f"server-{servers}": 0.05 + draw(seed, "more") * 0.5} if draw(seed, "is more") < 0.25 else {}
    retires = {}
    if draw(seed, "retires") < 0.25 and servers + len(late_servers) > 1:
        retires = {f"server-{number(0, servers - 1, 'who')}": 0.1 + draw(seed, "retires when") * 0.6}
    count = number(0, 5, "faults")
    faults = tuple(fault_of(seed, k) for k in range(count) if keep is None or k in keep)
    data, epochs = None, 0
    if draw(seed, "leases") < LEASED:
        data, epochs = Loader(number(20, 60, "samples"), number(1, 5, "batch")), number(2, 3, "epochs")
        scripts = dict.fromkeys(scripts, ("epoch",) * epochs)
        more = tuple(fault_of(seed, k) for k in range(count, count + number(0, 3, "more faults")) if keep is None)
        faults = tuple(dataclasses.replace(fault, when=1.7 * fault.when) for fault in faults + more)
        if draw(seed, "spare") < 0.15:
            policy, servers, replicas, workers, late_servers, retires = "sync:spare=1", 1, 1, max(2, workers), {}, {}
            scripts = {f"worker-{k}": ("epoch",) * epochs for k in range(workers)}
            late = {}
    saves: tuple[float, ...] = ()
    if SAVES <= seed < RING:
        saves = tuple(0.02 + 0.7 * draw(seed, "save", k) for k in range(number(2, 6, "saves")))
    if SPARE <= seed < SAVES or (saves and draw(seed, "saves spare") < 0.2):
        workers, late = (workers, late) if workers > 1 else (2, {})
        policy = f"sync:spare={number(1, workers - 1, 'spare')}"
        known = list(scripts.values())
        scripts = {f"worker-{k}": known[k % len(known)] for k in range(workers + len(late))}
    if seed >= RING:
        policy, replicas, workers, late_servers, retires = "sync", 2, max(workers, 2 + (seed % 4 > 0)), {}, {}
        known, late = list(scripts.values()), {f"worker-{workers}": when for when in late.values()}
        scripts = {f"worker-{k}": known[k % len(known)] for k in range(workers + len(late))}
        servers = workers
    in_rounds = policy.startswith("sync")
    return Scenario(
        seed=seed, policy=policy, replicas=replicas, servers=servers, workers=workers,
        window=0 if in_rounds else 2 * number(0, 1, "window"), slices=servers + number(0, 2, "slices"),
        pull_every=1 if in_rounds else number(1, 3, "pull"), scripts=scripts, late_workers=late,
        late_servers=late_servers, retires=retires, hold_seconds=0.03 if draw(seed, "hold") < 0.2 else 0.15,
        faults=faults, data=data, epochs=epochs, saves=saves,
        barrier_seconds=0.008 if draw(seed, "gate") < 0.15 else 0.6, is_ring=seed >= RING,
    )  # fmt: skip


def scenario_on(scenario: Scenario) -> Scenario:
    """Who takes up a checkpoint of this job: another number of workers and servers, and any policy."""
    seed = scenario.seed

    def number(least: int, most: int, key: str) -> int:
        return least + int(draw(seed, "on", key) * (most - least + 1))

    workers, servers = number(1, 4, "workers"), number(1, 3, "servers")
    policy = ("sync", "async", "bounded:1", "sync:spare=1")[number(0, 3 if workers > 1 else 2, "policy")]
    return dataclasses.replace(
        scenario, policy=policy, servers=servers, workers=workers, replicas=min(servers, scenario.replicas),
        slices=servers + number(0, 2, "slices"), pull_every=1,
        window=0 if policy.startswith("sync") else 2 * number(0, 1, "window"),
        scripts={f"worker-{k}": ("epoch",) * scenario.epochs for k in range(workers)},
        late_workers={}, late_servers={}, retires={}, faults=(), saves=(),
    )  # fmt: skip


def fault_of(seed: int, k: int) -> Fault:
    kind = KINDS[int(draw(seed, "fault", k) * len(KINDS))]
    long = draw(seed, "long", k) < 0.5
    seconds = 0.8 + 2.2 * draw(seed, "seconds", k) if long else 0.02 + 0.3 * draw(seed, "seconds", k)
    return Fault(
        k, 0.03 + 0.9 * draw(seed, "when", k), kind, draw(seed, "who", k), draw(seed, "whom", k), seconds,
        draw(seed, "flag", k) < 0.5,
    )  # fmt: skip
