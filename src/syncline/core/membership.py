"""Membership: who is in the job, and the state that survives the coordinator."""

from __future__ import annotations

import msgspec

from syncline.config import JobConfig
from syncline.core.checkpoint.schedule import SaveState
from syncline.core.leasing.leases import LeaseState
from syncline.core.members import Address, Member, by_name
from syncline.core.metrics import MetricState
from syncline.core.replica_sets import ReplicaSet, without
from syncline.core.ring import partner_of
from syncline.core.rounds import after_barrier
from syncline.core.stopping import Steering
from syncline.core.units import counted
from syncline.core.validation import ValidationState
from syncline.core.wire.control import Passed
from syncline.core.wire.pace import Paced
from syncline.errors import ConfigError

#: What to do if members do not start in time.
NOT_UP = (
    "their logs say how far they came. A worker is up when its script has called syncline.init(); if that takes "
    "longer, give more time with --start-seconds"
)


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """How a job ended: well, or by the death of a member with a reason."""

    failed: bool
    culprit: str
    reason: str


class JobState(msgspec.Struct, kw_only=True):
    """Everything that must survive the coordinator's death."""

    config: JobConfig
    generation: int = 0
    incarnations: int = 0  # assigned so far
    members: dict[str, Member] = {}  # live ones
    processes: dict[str, str] = {}  # member -> its process, so that repeated requests get the same answer
    formed: bool = False
    entered: dict[str, int] = {}  # workers that take part in rounds, with their incarnations
    left: list[str] = []  # workers that have finished, or were asked to leave
    finished: dict[str, Member] = {}  # those that have finished
    chief_done: str = ""  # the chief among them: no other worker becomes the chief
    lives: dict[str, int] = {}  # worker name -> how often it has joined
    #: Worker name -> the last life that is over and settled on every server, and the counted commits of all of these.
    settled: dict[str, tuple[int, int]] = {}
    fencing: dict[str, tuple[int, str]] = {}  # evicted, not settled on every server yet: incarnation, reason
    replica_sets: dict[int, ReplicaSet] = {}
    replica_sets_before: dict[int, ReplicaSet] = {}  # in a ring: servers named since may not have everything yet
    lost: list[int] = []  # slices that no server has
    ready: list[int] = []  # segments whose values are on the servers
    wanted: dict[str, int] = {}  # role -> wanted number
    num_scalings: int = 0  # how often that was set
    nominal_weight: float = 0.0  # of a push that counts in full, in bounded and async; 0: no step was made yet
    phase: int = 0
    passed: dict[str, int] = {}  # barrier -> the last turn that all have passed
    awaited: dict[str, str] = {}  # dead, being restarted: name -> role
    returning: list[str] = []  # of these, workers that have left themselves and said that they come back
    paces: dict[str, Paced] = {}  # workers that are slowed or held by hand
    num_revoked: int = 0  # acknowledged updates that were lost with a server
    leases: LeaseState = msgspec.field(default_factory=LeaseState)  # leases and progress of the data
    metrics: MetricState = msgspec.field(default_factory=MetricState)
    steering: Steering = msgspec.field(default_factory=Steering)  # the state of the stop rules
    validations: ValidationState = msgspec.field(default_factory=ValidationState)
    saves: SaveState = msgspec.field(default_factory=SaveState)  # checkpoints
    is_changing: bool = False  # this generation may not be installed everywhere
    num_steps: int = 0  # of the job, when this was journaled
    outcome: Outcome | None = None


class Membership:
    """The members of a job: joining, leaving, dying, returning."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self.finishing: set[str] = set()  # workers whose scripts have ended and that wait for the last save
        if not state.wanted:
            state.wanted = {"worker": state.config.workers, "server": state.config.servers}

    # -- who there is -------------------------------------------------------------------------------------

    @property
    def outcome(self) -> Outcome | None:
        return self.state.outcome

    @property
    def awaited(self) -> dict[str, str]:
        return self.state.awaited

    @property
    def generation(self) -> int:
        return self.state.generation

    @property
    def formed(self) -> bool:
        return self.state.formed

    def named(self, role: str) -> list[str]:
        """The live members of a role, by seniority."""
        found = [(m.since, by_name(m.name), m.name) for m in self.state.members.values() if m.role == role]
        return [name for _, _, name in sorted(found)]

    def has(self, role: str) -> bool:
        """Whether any member of this role is there."""
        return any(member.role == role for member in self.state.members.values())

    def workers(self) -> list[str]:
        """The live workers by rank."""
        return self.named("worker")

    def servers(self) -> list[str]:
        return sorted(self.named("server"), key=by_name)

    def hosts(self) -> list[str]:
        """The servers that can get new slices: a late server does not know the workers' positions before its first
        move.
        """
        state, servers = self.state, self.servers()
        primaries = {replica_set.primary for replica_set in state.replica_sets.values()}
        return [name for name in servers if name in primaries or state.members[name].since <= 1] or servers

    def ordered(self) -> list[Member]:
        return sorted(self.state.members.values(), key=lambda m: (m.since, by_name(m.name)))

    @property
    def chief(self) -> str:
        """The worker of rank 0: the most senior live one."""
        names = self.workers()
        if names and (self.formed or len(names) >= self._least("worker")):
            return names[0]
        return "worker-0"

    def _least(self, role: str) -> int:
        config = self.state.config
        return (config.least_workers or config.workers) if role == "worker" else config.servers

    def missing(self) -> list[str]:
        """Members that are expected at the start and missing. In a ring a missing process is named once."""
        there, wanted = self.state.members, self.state.wanted
        names = [f"{role}-{k}" for role in ("server", "worker") for k in range(wanted[role])]
        missing = [name for name in names if name not in there]
        if self.state.config.is_ring:
            return [name for name in missing if name.startswith("worker-") or partner_of(name) in there]
        return missing

    def may_form(self, has_gathered: bool) -> bool:
        """Whether the job can start: all wanted members are there, or the least number after some time."""
        if self.formed or not self._has_servers():
            return False
        count = len(self.workers())
        return count >= self.state.wanted["worker"] or (has_gathered and count >= self._least("worker"))

    def _has_servers(self) -> bool:
        if self.state.config.is_ring:
            return all(partner_of(name) in self.state.members for name in self.workers())
        return len(self.servers()) >= self.state.wanted["server"]

    def form(self) -> None:
        """The job is formed: its first generation, in which all take part."""
        state = self.state
        state.formed, state.generation = True, state.generation + 1
        state.members = {n: msgspec.structs.replace(m, since=state.generation) for n, m in state.members.items()}
        state.entered = {name: state.members[name].incarnation for name in self.workers()}

    # -- comings ------------------------------------------------------------------------------------------

    def join(
        self, role: str, name: str, host: str, address: Address | None, process: str = "", kind: str = "",
        cores: str = "", pid: int = 0, num_cores: int = 0,
    ) -> Member:  # fmt: skip
        """Adds a member, or raises ConfigError. An empty name gets the next free one."""
        state = self.state
        same = self._of_process(process, role)
        if same and name in ("", same):
            return state.members[same]  # repeated: the answer was lost
        most = self._most(role)
        name = name or self._free_name(role, process, most)
        stem, _, number = name.rpartition("-")
        if stem != role or not number.isdecimal() or int(number) >= most or len(self.named(role)) >= most:
            counts = f"{counted(len(self.workers()), 'worker')} and {counted(len(self.servers()), 'server')}"
            raise ConfigError(
                f"no {role} {name or 'more'} is expected: the job has {counts}, at most {most} of these"
            )
        if name in state.members:
            raise ConfigError(f"{name} is in the job already; each name is one process")
        state.incarnations += 1
        if self.formed:
            state.generation += 1
        incarnation, since = state.incarnations, state.generation
        member = Member(name, role, incarnation, host, address, since, kind, cores, pid, num_cores)
        state.members[name], state.processes[name] = member, process
        self._stop_awaiting(name)
        state.finished.pop(name, None)
        if role == "worker":
            state.lives[name] = state.lives.get(name, 0) + 1
            state.chief_done = "" if state.chief_done == name else state.chief_done
        if name in state.left:
            state.left.remove(name)
        return member

    def _of_process(self, process: str, role: str) -> str:
        """The member of this role in this process, if any."""
        known = self.state.processes.items()
        return next((n for n, one in known if process and one == process and n.startswith(f"{role}-")), "")

    def beside(self, name: str) -> str:
        """In a ring: the other member of the same process; "" if there is none."""
        role = name.rpartition("-")[0]
        return self._of_process(self.state.processes.get(name, ""), "server" if role == "worker" else "worker")

    def _free_name(self, role: str, process: str, most: int) -> str:
        """The next free name; in a ring both members of a process have the same number."""
        taken = {*self.state.members, *self.state.awaited}
        if self.state.config.is_ring:
            other = self._of_process(process, "server" if role == "worker" else "worker")
            if other:
                return partner_of(other)
            taken |= {partner_of(name) for name in taken}
        return next((name for k in range(most) if (name := f"{role}-{k}") not in taken), "")

    def _most(self, role: str) -> int:
        """The limit for this role; servers may always join, to take over slices."""
        config, wanted = self.state.config, self.state.wanted[role]
        if role == "server" and not config.is_ring:
            return wanted if not self.formed else 1 << 16
        return max(config.most_workers or config.workers, wanted)

    # -- goings -------------------------------------------------------------------------------------------

    def leave(self, name: str, retired: bool = False, *, comes_back: bool = False) -> Outcome | None:
        """A member has finished or was asked to leave. The job ends well with its last worker, unless that one comes
        back.
        """
        was_chief = not self.state.chief_done and name == self.chief
        member = self._remove(name)
        if member is not None and member.role == "worker":
            if not retired:
                self.state.finished[name] = member
                self.state.chief_done = name if was_chief else self.state.chief_done
            if name in self.state.entered:
                # A server that got its slices after that may still count it.
                self.state.fencing[name] = (self.state.entered.pop(name), "has left")
            if name not in self.state.left:
                self.state.left.append(name)
            if retired and comes_back:
                self.await_return(name)
                self.state.returning.append(name)
        self.end_if_done()
        return self.outcome

    def _remove(self, name: str) -> Member | None:
        member = self.state.members.pop(name, None)
        self.state.processes.pop(name, None)
        if member is not None and self.formed:
            self.state.generation += 1
        return member

    def evict(self, name: str, reason: str) -> list[int]:
        """Removes a member that is dead or counts as dead. Returns the slices that no server has any more.

        If a server died, a backup becomes the primary of each slice whose primary it was. Servers learn of it by the
        next reconfiguration.
        """
        member = self._remove(name)
        if member is None:
            return []
        if member.role == "worker":
            if name in self.state.entered:
                self.state.fencing[name] = (self.state.entered.pop(name), reason)
            return []
        # A coordinator that dies before it announces the new replica sets must know that they are pending.
        self.state.is_changing = self.state.is_changing or self.formed
        replica_sets, lost = without(self.state.replica_sets.values(), {name})
        self.state.replica_sets.update((replica_set.slice, replica_set) for replica_set in replica_sets)
        fresh = [number for number in lost if number not in self.state.lost]
        self.state.lost += fresh
        return fresh

    def await_return(self, name: str) -> None:
        """This dead member is being restarted."""
        self.state.awaited[name] = name.rpartition("-")[0]

    def has_not_returned(self, name: str) -> None:
        """This worker has left and does not come back in time: the job goes on without it."""
        self._stop_awaiting(name)

    def _stop_awaiting(self, name: str) -> None:
        self.state.awaited.pop(name, None)
        if name in self.state.returning:
            self.state.returning.remove(name)

    def give_up_on(self, name: str, reason: str) -> None:
        """This member does not come back: the job ends with this outcome."""
        self._stop_awaiting(name)
        self.fail(name, f"{name} {reason}")

    def fail(self, culprit: str, reason: str) -> None:
        self._end(Outcome(True, culprit, reason))

    def end_if_done(self) -> None:
        if self.formed and self.state.left and not self.workers() and "worker" not in self.state.awaited.values():
            self._end(Outcome(False, "", "all workers have finished"))

    def never_came(self, seconds: float) -> Outcome | None:
        """The deadline for all members to join has passed."""
        names = self.missing()
        if names and not self.formed:
            self._end(Outcome(True, names[0], f"{', '.join(names)} did not come up within {seconds:g} s; {NOT_UP}"))
        return self.outcome

    def _end(self, outcome: Outcome) -> None:
        self.state.outcome = self.state.outcome or outcome


class Barriers:
    """Barriers by name and turn: complete when every worker that has not left is there."""

    def __init__(self, phase: int = 0, passed: dict[str, int] | None = None) -> None:
        self._waiting: dict[tuple[str, int], set[str]] = {}
        self._phase = phase
        self.passed: dict[str, int] = {} if passed is None else passed

    def arrive(self, name: str, turn: int, worker: str, phase: int = 0) -> bool:
        """Returns whether it waits. A passed barrier is open to late workers and repeated requests."""
        if turn <= self.passed.get(name, 0):
            return False
        self._waiting.setdefault((name, turn), set()).add(worker)
        self._phase = max(self._phase, phase)
        return True

    @staticmethod
    def behind_passed(phase: int, begun: int, turn: int = 0) -> Passed:
        """The answer for a barrier that was passed earlier. `begun`: the phase begun by the last barrier. `turn`: the
        last passed turn of this barrier.

        A worker that repeats its request may have missed the answer. One that is already in that barrier epoch came
        late and stays out.
        """
        return Passed(max(phase, begun), is_away=phase >= begun, turn=turn)

    def next_phase(self) -> int:
        """The phase after a barrier: later than any phase so far."""
        self._phase = after_barrier(self._phase)
        return self._phase

    def ready(self, workers: list[str]) -> list[tuple[str, int]]:
        """Barriers that all of these have reached."""
        return [key for key, there in self._waiting.items() if workers and there.issuperset(workers)]

    def pass_all(self, keys: list[tuple[str, int]]) -> list[int]:
        """Opens these barriers. Returns the phase after each."""
        for name, turn in keys:
            self.passed[name] = max(turn, self.passed.get(name, 0))
        return [self.next_phase() for _ in keys]

    def take_back(self, passed: dict[str, int]) -> None:
        """Journaling failed and no worker was told: closes them again."""
        self.passed.clear()
        self.passed.update(passed)

    def forget(self, keys: list[tuple[str, int]]) -> None:
        """No worker waits at these any more."""
        for key in keys:
            self._waiting.pop(key, None)

    def missing(self, name: str, turn: int, workers: list[str]) -> list[str]:
        there = self._waiting.get((name, turn), set())
        return [worker for worker in workers if worker not in there]
