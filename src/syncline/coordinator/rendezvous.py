"""What members must agree on before they go on: the roster of a generation, their earlier lives, and barriers."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import msgspec

from syncline.coordinator.job import JobContext
from syncline.coordinator.validation import ValidationService
from syncline.core.membership import Barriers
from syncline.core.metrics import weighted_means
from syncline.core.wire.control import (
    AskLife,
    AskRoster,
    AskServerStats,
    Barrier,
    GivenLife,
    GivenServerStats,
    Passed,
)
from syncline.errors import StoreError
from syncline.net.rpc import Call, Request
from syncline.stats import Wait


class RosterService:
    """Tells members which generation they are in, and tells a restarted worker what counts of its earlier lives."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._asking: list[tuple[Request, int]] = []  # for the roster of this generation or a later one
        self._asking_life: dict[str, Request] = {}  # by worker

    def ask_roster(self, request: Request, message: AskRoster) -> None:
        """Replies when the job has reached the generation, and primaries are not about to change."""
        with self._job.lock:
            if self._job.is_moving or self._job.membership.generation < message.generation:
                self._asking.append((request, message.generation))
                return
        request.reply(self._job.roster())

    def announce(self) -> None:
        """Sends the roster to all members, unless primaries are about to change."""
        with self._job.lock:
            if self._job.is_moving or not self._job.membership.formed:
                return
            roster = self._job.roster()
            endpoints = list(self._job.endpoints.values())
            asking = [request for request, generation in self._asking if generation <= roster.generation]
            self._asking = [asked for asked in self._asking if asked[1] > roster.generation]
        for request in asking:
            request.reply(roster)
        for endpoint in endpoints:
            endpoint.mention(roster)

    # -- earlier lives ------------------------------------------------------------------------------------

    def ask_life(self, request: Request, message: AskLife) -> None:
        """Replies when all servers have settled which commits of this name's earlier lives count."""
        with self._job.lock:
            self._asking_life[request.peer.name] = request
        self.answer_lives()

    def answer_lives(self) -> None:
        """Replies to the workers whose earlier lives are settled by now. The servers know the step of the job."""
        with self._job.lock:
            fencing = self._job.membership.state.fencing
            ready = [request for name, request in self._asking_life.items() if name not in fencing]
            self._asking_life = {name: request for name, request in self._asking_life.items() if name in fencing}
        if ready:
            self._job.ask_all_servers(AskServerStats(), functools.partial(self._give_lives, ready))

    def _give_lives(self, requests: Sequence[Request], calls: Sequence[Call]) -> None:
        servers = [call.answer.stats for call in calls if isinstance(call.answer, GivenServerStats)]
        with self._job.lock:
            state = self._job.membership.state
            step = max([self._job.step(), *(server.most_updates for server in servers)])
            lives = [
                GivenLife(
                    state.lives.get(name, 1), step, commits, self._rates_known_to(name), self._steps_in(name, commits)
                )
                for name, commits in (
                    (request.peer.name, state.settled.get(request.peer.name, (0, 0))[1]) for request in requests
                )
            ]
        for request, given in zip(requests, lives, strict=True):
            request.reply(given)

    def _steps_in(self, name: str, commits: int) -> int:
        """Under the lock: the local steps in these commits of this name; 0: unknown."""
        known = self._job.committed.get(name)
        return known.at(commits) if known is not None else 0

    def _rates_known_to(self, name: str) -> dict[str, list[float]]:
        """Under the lock: the last learning rates of this name, each with those of the other workers."""
        rates = self._job.rates
        others = [other for other in self._job.membership.workers() if other != name]
        return {
            key: [rate, *(rates[other][key] for other in others if key in rates.get(other, {}))]
            for key, rate in rates.get(name, {}).items()
        }

    def forget(self, name: str) -> None:
        """This member is gone, or its connection is."""
        self._asking_life.pop(name, None)


class BarrierService:
    """Barriers: all workers arrive, then all go on."""

    def __init__(self, job: JobContext, validation: ValidationService) -> None:
        self._job, self._validation = job, validation
        state = job.membership.state
        self._barriers = Barriers(state.phase, state.passed)
        self._arrived: dict[tuple[str, int], list[tuple[Request, float]]] = {}  # by barrier and turn, and since when
        self._merged: dict[str, tuple[int, dict[str, float]]] = {}  # by barrier: the last turn with values

    def arrive(self, request: Request, message: Barrier) -> None:
        """Replies when all workers have arrived; at once when this turn of the barrier is already over."""
        with self._job.lock:
            if not self._barriers.arrive(message.name, message.turn, request.peer.name, message.phase):
                phase, turn = self._job.membership.state.phase, self._barriers.passed[message.name]
                answer = self._barriers.behind_passed(message.phase, phase, turn)
                merged_at, values = self._merged.get(message.name, (0, {}))
                request.reply(msgspec.structs.replace(answer, values=values if merged_at == message.turn else {}))
                return
            arrived = self._arrived.setdefault((message.name, message.turn), [])
            arrived[:] = [known for known in arrived if known[0].peer.name != request.peer.name]
            arrived.append((request, time.monotonic()))
        self.release()

    def tick(self, now: float) -> None:
        """Runs periodically: a full disk may have delayed a release."""
        self.release()

    def release(self) -> None:
        """Starts a validation and opens barriers, if all workers have arrived there. It is kept before they go on."""
        state = self._job.membership.state
        self._validation.start_if_complete()
        with self._job.lock:
            complete = self._barriers.ready(self._job.barrier_workers())
            if not complete:
                return
            before = (state.phase, dict(state.passed))
            phases = self._barriers.pass_all(complete)
            state.phase = phases[-1]
            try:
                self._job.keep()
            except StoreError as error:
                state.phase = before[0]
                self._barriers.take_back(before[1])
                self._job.report_disk_error(error)
                return
            passed = [(key, self._arrived.pop(key, []), phase) for key, phase in zip(complete, phases, strict=True)]
            self._barriers.forget(complete)
        for (name, turn), arrived, phase in passed:
            values = self._merge(name, turn, [request for request, _ in arrived])
            for request, _ in arrived:
                request.reply(Passed(phase, values=values))

    def _merge(self, name: str, turn: int, requests: Sequence[Request]) -> dict[str, float]:
        """The means of what workers brought along. A worker that missed the answer asks again, so they are kept."""
        found = weighted_means(request.message.values for request in requests if isinstance(request.message, Barrier))
        if found:
            self._merged[name] = (turn, found)
        return found

    def waits(self, now: float) -> list[Wait]:
        """Under the lock: for which workers the barriers wait."""
        found = []
        for (name, turn), arrived in self._arrived.items():
            missing = self._barriers.missing(name, turn, self._job.barrier_workers())
            since = min(at for _, at in arrived)
            found.append(Wait("", turn, missing, now - since, f"the barrier {name!r}"))
        return found
