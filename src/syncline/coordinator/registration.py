"""Registrations: the chief's parameters define the layout; servers host them; then they get values and backups."""

from __future__ import annotations

import math
import time
from collections.abc import Collection

from syncline import faults
from syncline.coordinator.job import JobContext, when_all
from syncline.coordinator.restore import ResumeService
from syncline.core.layout import Segment
from syncline.core.policy import policy_of
from syncline.core.units import size
from syncline.core.wire.checkpoints import Resume
from syncline.core.wire.control import AskNominal, GivenNominal, Host, Register, Registered, Uploaded
from syncline.core.wire.message import Done
from syncline.errors import ConnectionLost, ProtocolError, StoreError, SynclineError
from syncline.net.rpc import Call, Request


class RegistrationService:
    """All registrations that are not complete yet."""

    def __init__(self, job: JobContext, resume: ResumeService) -> None:
        self._job, self._resume = job, resume
        self._is_held = False  # a snapshot is being taken
        self._waiting: list[tuple[Request, float]] = []
        self._asked: set[int] = set()  # segments that the chief was asked to upload since they were hosted
        self._uploaded: dict[int, list[Request]] = {}  # segments with values but without all backups
        self._too_late: list[Request] = []  # uploads that were lost with a server
        self._loading: set[int] = set()  # segments that servers read from a checkpoint now

    def waiting(self) -> list[tuple[str, float]]:
        """Under the lock: the workers that wait for a registration, and since when."""
        return [(request.peer.name, since) for request, since in self._waiting]

    def hold(self) -> None:
        """Under the lock: a snapshot is being taken. Registrations wait until `release`."""
        self._is_held = True

    def release(self) -> None:
        """The snapshot is over."""
        with self._job.lock:
            self._is_held = False
        self.retry_waiting()

    def register(self, request: Request, message: Register) -> None:
        """Replies with the segments of these parameters, once they have values. The chief is asked to upload them."""
        who = request.peer.name
        with self._job.lock:
            if not self._job.membership.formed:
                raise ProtocolError("the job has not started yet")
            if self._job.is_moving or self._is_held or not self._job.registry.servers:
                self._wait(request)  # slices are about to move, or a snapshot is being taken
                return
            registry = self._job.registry
            registry.servers = self._job.membership.hosts()
            is_chief = who == self._job.membership.chief
            if is_chief and not registry.layout.knows_all(message.parameters):
                self._resume.check_registration(who, message)
            decision = registry.register(
                who, is_chief, message.ordinal, message.parameters, message.rules, message.reduce
            )
            segment = decision.segment
            if segment is not None:
                self._job.keep_segment(segment)
                self._job.keep()
                self._tell_memory(segment)
                faults.reach("register.kept")
            elif decision.kind == "wait":
                segment = self._lacking_values(message) if is_chief else None
                if segment is None:
                    self._wait(request)
                    return
        if segment is None:
            with self._job.lock:
                answer = self._answer(registry.segments_with(message.parameters))
            request.reply(answer)
        else:
            self._host(request, segment)

    def _tell_memory(self, segment: Segment) -> None:
        """Under the lock: says what an aggregation of all pushes needs."""
        how, num_workers = policy_of(self._job.config).aggregate, len(self._job.membership.workers())
        if how is not None and how.needs_all:
            needed = size(num_workers * segment.num_bytes)
            self._job.event(f"--aggregate {how} needs the pushes of all {num_workers} workers at once: {needed}")

    def nominal_weight(self, request: Request, message: AskNominal) -> None:
        """Replies with the weight of a push that counts in full: the chief's first one, which is kept."""
        if not (math.isfinite(message.weight) and message.weight > 0):
            raise ProtocolError(f"{request.peer} asks for a nominal weight with {message.weight}")
        with self._job.lock:
            state = self._job.membership.state
            if not state.nominal_weight and (message.insists or request.peer.name == self._job.membership.chief):
                state.nominal_weight = message.weight
                self._job.keep()
            answer = GivenNominal(state.nominal_weight)
        request.reply(answer)

    def _wait(self, request: Request) -> None:
        """Under the lock. A repeated request replaces the worker's earlier one."""
        self._waiting = [w for w in self._waiting if w[0].peer.name != request.peer.name]
        self._waiting.append((request, time.monotonic()))

    def _lacking_values(self, message: Register) -> Segment | None:
        """The segment that the chief must still upload, when it asks again or is a new chief."""
        where = self._job.registry.layout.where
        if not message.parameters or any(parameter.name not in where for parameter in message.parameters):
            return None
        segment = where[message.parameters[0].name][0]
        known = self._job.registry.ready | self._uploaded.keys() | self._loading
        is_done = segment.index in known
        return None if is_done else self._job.registry.layout.segments[segment.index]

    def _answer(self, segments: list[Segment], upload: int | None = None) -> Registered:
        state = self._job.membership.state
        return Registered(segments, list(state.replica_sets.values()), state.generation, upload)

    def _host(self, request: Request, segment: Segment) -> None:
        """All servers allocate their slices of the segment; then its values come from the checkpoint or the chief."""
        with self._job.lock:
            endpoints = {name: self._job.endpoints.get(name) for name in self._job.membership.servers()}
            replica_sets = self._job.membership.state.replica_sets
            mine = {name: [p.id for p in segment.slices if replica_sets[p.id].primary == name] for name in endpoints}
            if None in endpoints.values():
                self._wait(request)  # for a server that reconnects, or is evicted soon
                return

        def hosted(calls: list[Call]) -> None:
            try:
                for call in calls:
                    call.wait(0)
            except ConnectionLost:
                with self._job.lock:
                    self._wait(request)  # until the members have changed
                return
            except SynclineError as error:
                self._undo(segment)
                request.refuse(error)
                return
            try:
                is_saved = self._resume.has_values_of(segment)
            except SynclineError as error:
                self._undo(segment)
                request.refuse(error)
                return
            if is_saved:
                self._load_values(request, segment)
            else:
                self._ask_for_values(request, segment.index)

        try:
            calls = [e.call(Host(segment, mine[name])) for name, e in endpoints.items() if e is not None]
        except ConnectionLost:
            with self._job.lock:
                self._wait(request)
            return
        when_all(calls, hosted)

    def _ask_for_values(self, request: Request, index: int) -> None:
        """Asks the chief to upload. Its upload counts until a server that has some of it is lost."""
        with self._job.lock:
            if self._job.is_moving:  # the upload would go to a server that is out: later
                if isinstance(request.message, Uploaded):
                    self._too_late.append(request)
                else:
                    self._wait(request)
                return
            self._asked.add(index)
            roster = self._job.roster()
            answer = self._answer(list(self._job.registry.layout.segments[: index + 1]), index)
        request.endpoint.mention(roster)  # the chief may not know these servers yet
        request.reply(answer)

    def _load_values(self, request: Request, segment: Segment) -> None:
        """Each server reads its slices from the checkpoint that the job resumes from."""
        with self._job.lock:
            known, replica_sets = (
                self._job.membership.state.saves.resumed_from,
                self._job.membership.state.replica_sets,
            )
            mine: dict[str, list[int]] = {}
            for part in segment.slices:
                mine.setdefault(replica_sets[part.id].primary, []).append(part.id)
            endpoints = {name: self._job.endpoints.get(name) for name in mine}
            if self._job.is_moving or None in endpoints.values() or segment.index in self._loading:
                self._wait(request)
                return
            assert known is not None
            fresh = self._resume.changed_rules(segment)
            self._asked.add(segment.index)
            self._loading.add(segment.index)
        calls, lost = [], False
        for name, endpoint in endpoints.items():
            try:
                assert endpoint is not None
                calls.append(endpoint.call(Resume(known.folder, known.digest, mine[name], fresh=fresh)))
            except ConnectionLost:
                lost = True
        when_all(calls, lambda calls: self._has_loaded(request, segment, calls, lost))

    def _has_loaded(self, request: Request, segment: Segment, calls: list[Call], lost: bool) -> None:
        """In the thread of the last answer."""
        try:
            for call in calls:
                call.wait(0)
        except ConnectionLost:
            lost = True
        except SynclineError as error:
            self._loading.discard(segment.index)
            self._undo(segment)
            request.refuse(error)
            return
        with self._job.lock:
            self._loading.discard(segment.index)
            if not any(waiting.peer.name == request.peer.name for waiting, _ in self._waiting):
                self._wait(request)  # unless the worker has asked again meanwhile
            counts = not lost and segment.index in self._asked
            if counts:
                self._uploaded.setdefault(segment.index, [])
        if counts:
            self._has_values()
        elif not lost:
            self.retry_waiting()  # a server that had some of it was lost

    def _has_values(self) -> None:
        """The segment is ready now, or when its backups are there."""
        with self._job.lock:
            config = self._job.config
            has_backups = (config.replicas > 1 or config.is_ring) and len(self._job.membership.servers()) > 1
        if has_backups:
            self._job.wake_reconfigurer()  # it calls `finish_uploads` when the backups are there
        else:
            self.finish_uploads()

    def _undo(self, segment: Segment) -> None:
        """The segment could not be hosted: removes it from the layout and from the journal."""
        with self._job.lock:
            registry, state = self._job.registry, self._job.membership.state
            registry.take_back(segment)
            if segment.index < len(registry.layout.segments):
                return  # it was removed before, and another segment has its number
            state.lost = [number for number in state.lost if number in state.replica_sets]
            self._job.drop_segment(segment)
            self._job.try_keep()  # or with the next `keep`

    def uploaded(self, request: Request, message: Uploaded) -> None:
        """The chief has uploaded a segment. Replies when the segment has its backups, or asks for another upload."""
        with self._job.lock:
            if request.peer.name != self._job.membership.chief:
                raise ProtocolError(f"{request.peer} is not the chief, whose values count")
            if not 0 <= message.segment < len(self._job.registry.layout.segments):
                raise ProtocolError(f"there is no segment {message.segment}")
            if message.segment in self._job.registry.ready:
                request.reply(Done())
                return
            counts = message.segment in self._asked
            if counts:
                self._uploaded.setdefault(message.segment, []).append(request)
        if counts:
            self._has_values()
        else:
            self._ask_for_values(request, message.segment)

    def slices_are_lost(self, slices: Collection[int]) -> None:
        """Under the lock. Lost slices start again with zeros: segments that were not ready need a new upload."""
        for segment in self._job.registry.layout.segments:
            if segment.index not in self._job.registry.ready and any(part.id in slices for part in segment.slices):
                self._asked.discard(segment.index)
                self._too_late += self._uploaded.pop(segment.index, [])

    @property
    def has_uploads(self) -> bool:
        """Whether segments with values wait for their backups."""
        return bool(self._uploaded)

    def slices_with_values(self) -> set[int]:
        """Under the lock."""
        known = self._job.registry.ready | set(self._uploaded)
        return {part.id for s in self._job.registry.layout.segments if s.index in known for part in s.slices}

    def finish_uploads(self) -> None:
        """Segments with values have their backups now: all workers may use them."""
        with self._job.lock:
            uploaded, self._uploaded = self._uploaded, {}
            if not uploaded:
                return
            self._job.registry.ready.update(uploaded)
            try:
                self._job.keep()
            except StoreError:
                self._job.registry.ready.difference_update(uploaded)
                self._uploaded = {**uploaded, **self._uploaded}  # the chief is answered once it is kept
                raise
        for requests in uploaded.values():
            for request in requests:
                request.reply(Done())
        self.retry_waiting()

    def retry_waiting(self) -> None:
        """Tries the waiting registrations again, since something has changed."""
        with self._job.lock:
            waiting, self._waiting = self._waiting, []
            too_late, self._too_late = self._too_late, []
        for request in too_late:
            assert isinstance(request.message, Uploaded)
            self._ask_for_values(request, request.message.segment)
        for request, _ in waiting:
            try:
                assert isinstance(request.message, Register)
                self.register(request, request.message)
            except SynclineError as error:
                request.refuse(error)
