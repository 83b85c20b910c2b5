"""A whole simulated job: its processes, its launcher, its faults, and the look at its end."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from syncline.config import JobConfig
from syncline.core.checkpoint.snapshot import ledger_to_resume
from syncline.core.leasing.leases import LeaseState
from syncline.core.membership import JobState
from syncline.core.policy import parse_policy
from syncline.core.reconfigure import Reconfiguration
from syncline.core.ring import partner_of

from .coordinator import Coordinator
from .faults import Fault, Scenario, scenario_of, scenario_on
from .hosting import Hosted
from .ledger import Ledger
from .reader import Reader
from .ring import RingServer, check_copies
from .saving import Saves, Taken
from .server import Server
from .worker import Worker
from .world import Process, Violation, World

#: After the last fault every waiter is released, and the job done, within this.
DONE_SECONDS = 40.0
#: In a ring: in so many changes a process dies, until then.
STRIKE, LAST_STRIKE = 0.08, 1.5


class Job:
    """Runs one scenario to its end, or to the first invariant that does not hold."""

    def __init__(
        self, scenario: Scenario, bugs: Iterable[str] = (), *, taken: Taken | None = None, verbose: bool = False
    ) -> None:
        """`taken`: a cut through another job, which this one takes up."""
        self.scenario, self.bugs, self.taken = scenario, frozenset(bugs), taken
        self.world = World(scenario.seed, self.bugs, verbose=verbose)
        self.policy = parse_policy(scenario.policy)
        self.ledger = Ledger(
            self.world, scenario.slices, self.policy, is_even=scenario.is_even, epochs=scenario.epochs,
            num_samples=scenario.data.num_samples if scenario.data is not None else 0,
        )  # fmt: skip
        if taken is not None:
            self.ledger.samples.resume(taken.done, taken.excused)
        self.config = JobConfig(
            workers=scenario.workers, servers=scenario.servers, most_workers=len(scenario.scripts),
            policy=scenario.policy, replicas=scenario.replicas,
            exchange="ring" if scenario.is_ring else "servers",
        )  # fmt: skip
        self.saves = Saves(self.ledger)
        self.done: dict[str, int] = {}
        self.finished: set[str] = set()
        self.first_incarnations: dict[str, int] = {}
        self.is_new, self.is_lost = True, False
        self.first_generation = 0  # in which slices are hosted for the first time; one that slept may come to it late
        self._epoch = 0
        self._quiet_from, self._num_changes = LAST_STRIKE if scenario.is_ring else 0.0, 0

    def next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    @staticmethod
    def digest(ledger: dict[Any, int]) -> int:
        mark = 0
        for entry in ledger:
            mark ^= zlib.crc32(repr(entry).encode())
        return mark

    # -- running ------------------------------------------------------------------------------------------

    def run(self) -> Job:
        world, scenario = self.world, self.scenario
        world.restart = self._died
        world.start(Coordinator(self))
        for k in range(scenario.servers):
            world.start(self._server(f"server-{k}"))
        for k in range(scenario.workers):
            world.start(self._worker(f"worker-{k}"))
        for name, when in scenario.late_workers.items():
            world.at(when, lambda name=name: self._come(name))
        for name, when in scenario.late_servers.items():
            world.at(when, lambda name=name: world.start(self._server(name)))
        for name, when in scenario.retires.items():
            world.at(when, lambda name=name: self._retire(name))
        for when in scenario.saves:
            world.at(when, self._save)
        for fault in scenario.faults:
            world.at(fault.when, lambda fault=fault: self._strike(fault))
            self._quiet_from = max(self._quiet_from, fault.when + fault.seconds)
        world.run(self._quiet_from + DONE_SECONDS)
        if not world.ended:
            raise Violation(f"seed {scenario.seed}: not done {DONE_SECONDS:g} s after the last fault: {self.why()}")
        return self

    def _server(self, name: str) -> Server:
        return RingServer(self, name) if self.scenario.is_ring else Server(self, name)

    def _come(self, name: str) -> None:
        """A worker; in a ring, with its server."""
        if self.scenario.is_ring:
            self.world.start(self._server(partner_of(name)))
        self.world.start(self._worker(name))

    def lost_all(self) -> None:
        """In a ring: nobody that is left has a copy. The real job fails, and says so."""
        self.is_lost = self.world.ended = True

    def _worker(self, name: str) -> Worker:
        return Worker(self, name) if self.scenario.data is None else Reader(self, name)

    def _retire(self, name: str) -> None:
        process = self.world.current.get(name)
        if isinstance(process, Server) and process.is_alive:
            process.asks["retire"] = ()

    def _save(self) -> None:
        coordinator: Any = self.world.current["coordinator"]
        coordinator.run(coordinator.want_save)

    def leases(self) -> LeaseState:
        """What a new job begins with."""
        if self.taken is None:
            return LeaseState()
        return self.taken.leases if "leased_is_kept" in self.bugs else ledger_to_resume(self.taken.leases)

    def has_finished(self) -> None:
        if self.scenario.is_ring:
            for name in sorted(self.finished):
                pause = self.world.draw("retires", name)
                self.world.at(self.world.now + pause, lambda name=name: self._retire(partner_of(name)))
        if self.finished >= set(self.scenario.scripts):
            coordinator = self.world.current["coordinator"]
            if isinstance(coordinator, Coordinator) and coordinator.released:
                self.ledger.final(self.primaries(coordinator.state))
            self.world.ended = True

    # -- launcher -----------------------------------------------------------------------------------------

    def _died(self, process: Process) -> None:
        """Starts another in its place, after a pause."""
        world, name = self.world, process.name
        if self.scenario.is_ring and name != "coordinator":
            other = world.current.get(partner_of(name))
            if other is not None:
                world.crash(other, restart=False)
        if isinstance(process, Server):
            self.ledger.server_losses.append(world.now)
        if name != "coordinator" and world.draw("told", process.life) < 0.8:
            world.at(world.now + 0.005, lambda: self._tell(process))
        pause = 0.05 + 0.5 * world.draw("restart", process.life)
        world.at(world.now + pause, lambda: self._start_again(process))

    def _tell(self, process: Process) -> None:
        coordinator: Any = self.world.current["coordinator"]
        coordinator.run(lambda: coordinator.died(process.name, process.life))

    def _start_again(self, process: Process) -> None:
        name = process.name
        if self.world.current.get(name) is not process or name in self.finished:
            return
        if name == "coordinator":
            self.world.start(Coordinator(self))
        elif self.scenario.is_ring:
            worker = name if process.role == "worker" else partner_of(name)
            if worker not in self.finished:
                self._come(worker)
        elif isinstance(process, Server):
            self.world.start(Server(self, name))
        else:
            self.world.start(self._worker(name))

    # -- faults -------------------------------------------------------------------------------------------

    def _pick(self, luck: float, role: str = "") -> Process | None:
        found = [p for n, p in sorted(self.world.current.items()) if p.is_alive and (not role or p.role == role)]
        return found[int(luck * len(found))] if found else None

    def _strike(self, fault: Fault) -> None:
        world = self.world
        verb, _, role = fault.kind.partition("_")
        one = self._pick(fault.who, role)
        other = self._pick(fault.whom)
        world.note("fault", fault.kind, one.life if one else "", other.life if other else "")
        if one is None:
            return
        if verb == "crash":
            world.crash(one, silent=fault.flag)
        elif verb == "pause":
            world.pause(one, fault.seconds)
            if self.scenario.is_ring and role != "coordinator":
                world.pause(world.current[partner_of(one.name)], fault.seconds)
        elif verb == "second":
            coordinator = world.current["coordinator"]
            world.pause(coordinator, fault.seconds)
            world.start(Coordinator(self))
        elif verb == "torn":
            world.disk.torn[world.disk.num_saves + 1 + int(fault.whom * 3)] = fault.flag
        elif verb == "full":
            world.disk.full_until = world.now + fault.seconds
        elif verb == "break":
            sessions = [s for s in world.sessions.values() if not s.is_broken]
            if sessions:
                session = sessions[int(fault.who * len(sessions))]
                deaf = session.ends[int(fault.whom * 2)] if fault.flag else None
                world.break_session(session, ("fault", fault.number), deaf=deaf)
        elif verb == "replay":
            if world.old:
                world.replay(world.old[int(fault.who * len(world.old))], ("fault", fault.number))
        elif verb == "wall" and other is not None and other is not one:
            until = world.now + fault.seconds
            world.walls[one.name, other.name] = until
            if fault.flag:
                world.walls[other.name, one.name] = until

    def change_is_under_way(self) -> None:
        """In a ring much depends on who dies just now; not too many, or nobody is left who has a copy."""
        world, scenario = self.world, self.scenario
        ranks = [p for n, p in sorted(world.current.items()) if p.role == "server" and p.is_alive]
        if not scenario.is_ring or not scenario.faults or len(ranks) < 3 or world.now > LAST_STRIKE:
            return
        self._num_changes += 1
        if world.draw("strike", self._num_changes) < STRIKE:
            one = ranks[int(world.draw("struck", self._num_changes) * len(ranks))]
            world.at(world.now + 0.012 * world.draw("strikes", self._num_changes), lambda: world.crash(one))

    # -- looking ------------------------------------------------------------------------------------------

    def primaries(self, state: JobState) -> dict[int, Hosted | None]:
        found: dict[int, Hosted | None] = {}
        for number, replica_set in state.replica_sets.items():
            member = state.members.get(replica_set.primary)
            if member is not None and member.address is not None and number not in state.lost:
                server: Any = self.world.processes[member.address.unix]
                found[number] = server.hosted.get(number)
        return found

    def released(self, coordinator: Coordinator, change: Reconfiguration) -> None:
        gates = {
            p.life: p.barrier for p in self.world.current.values() if isinstance(p, Server) and p.barrier is not None
        }
        shut = {
            life: barrier for life, barrier in gates.items() if barrier.number <= coordinator.state.saves.num_begun
        }
        if shut and any(p.name in change.servers for p in self.world.current.values() if p.life in shut):
            self.ledger.fail(f"generation {change.generation} is released, and gates are closed: {shut}")
        if self.scenario.is_ring and change.moves:  # else a round may be on its way
            check_copies(self.ledger.fail, coordinator.state, self.world.processes)
        if not coordinator.state.lost:
            self.ledger.released(self.primaries(coordinator.state), change.fenced.items())

    def why(self) -> str:
        """For whom everything waits."""
        words = []
        for process in self.world.current.values():
            if not process.is_alive:
                continue
            if isinstance(process, Worker):
                steps = {clock: dict(step.states) for clock, step in process.open.items()}
                words.append(
                    f"{process.life} inc {process.incarnation} gen {process.generation} at {process.place} of "
                    f"{len(process.script)}, open {steps}, asks {process.asks}{process.what()}"
                )
            elif isinstance(process, Server):
                queues = {n: len(h.queue) for n, h in process.hosted.items() if h.queue}
                words.append(
                    f"{process.life} inc {process.incarnation} gen {process.generation}/{process.prepared}: "
                    f"{process.rounds.waiting_reason()}; queues {queues}; "
                    f"{[(s.name, s.incarnation, s.turn(), s.active) for s in process.rounds.standings.values()]}"
                )
            elif isinstance(process, Coordinator):
                state = process.state
                words.append(
                    f"{process.life} gen {state.generation} released {process.released} "
                    f"attempt {process.attempt and process.attempt['change'].servers} entered {state.entered} "
                    f"fencing {state.fencing} lost {state.lost} dirty {process.is_dirty} "
                    f"entering {process.deciding.entering}{process.what()}"
                )
        return "\n  ".join(words)


def play(seed: int, bugs: Iterable[str] = (), *, keep: frozenset[int] | None = None, verbose: bool = False) -> Job:
    """Runs this seed; raises a Violation that names it. A cut that was made is taken up by another job."""
    job = Job(scenario_of(seed, keep), bugs, verbose=verbose).run()
    if job.saves.taken and job.scenario.data is not None:
        taken = job.saves.taken[int(job.world.draw("taken up") * len(job.saves.taken))]
        Job(scenario_on(job.scenario), bugs, taken=taken, verbose=verbose).run()
    return job
