"""The keeper: holds the sockets and the memory of all versions, starts the other processes, and starts them again.

It runs none of the operator's code and loads no framework, so little can end it. The replicas themselves accept
connections, on a socket that they all have: no request passes through here.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from syncline.config import environment_names, inherited_environment
from syncline.errors import ConfigError, StoreError, SynclineError, WaitTimeout
from syncline.serve.metrics import ServingTotals, added_up
from syncline.serve.replicas.link import TO_KEEPER, MessageSocket, socket_pair
from syncline.serve.replicas.lives import ProcessLives
from syncline.serve.replicas.messages import (
    AskTotals,
    Beat,
    EndServing,
    Failed,
    Forget,
    FromKeeper,
    Load,
    Loaded,
    OfferAnswer,
    OfferVersion,
    ProcessFacts,
    Publish,
    Published,
    SetUp,
    Switch,
    Switched,
    TellTotals,
    ToKeeper,
    Totals,
    TotalsOfAll,
    Trying,
    Up,
)
from syncline.serve.versions import VersionFacts, VersionStanding

log = logging.getLogger("syncline.serve")

_TICK_SECONDS = 0.1
_TOTALS_SECONDS = 0.5  # a replica that does not say its totals in time counts with those that it said before
_LATE_SECONDS = 0.7  # beyond the draining of requests
_START_SECONDS = 600.0
_LOADER_FACTOR = 6.0  # a loader may be silent for longer: it runs the operator's `validate`
_MOST_DEATHS = 2  # of loaders at one version
_MOST_REFUSED = 64

#: What libraries read when they are loaded: OpenMP, OpenBLAS and MKL below NumPy; TensorFlow; XLA below JAX.
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "PJRT_NPROC", "NPROC"),
)

_Key = tuple[str, int]
LOADER, REPLICA = "loader", "replica"


@dataclasses.dataclass
class _Child:
    key: _Key
    process: subprocess.Popen[bytes]
    link: MessageSocket[ToKeeper]
    outbox: collections.deque[tuple[FromKeeper, list[int]]] = dataclasses.field(default_factory=collections.deque)
    totals: ServingTotals = dataclasses.field(default_factory=ServingTotals)
    words: Failed | None = None  # its last ones


@dataclasses.dataclass
class _Held:
    """A version whose weights are kept."""

    facts: VersionFacts
    descriptor: int | None
    waits_for: set[_Key]  # replicas that have not said whether they can load it
    is_answered: bool = False  # the loader knows


@dataclasses.dataclass
class _Asked:
    """Totals that are being collected."""

    number: int
    since: float
    waits_for: set[_Key]
    askers: list[tuple[_Key, int]]


class Keeper:
    """Runs a loader and `num_replicas` replicas from `start` to `close`, in a thread of its own."""

    def __init__(
        self, template: SetUp, num_replicas: int, threads: Sequence[int], sock: socket.socket, control: socket.socket
    ) -> None:
        """`template`: what all processes get. `threads`: of each replica. `sock`: listens for HTTP; `control`: for
        serve-ctl. Both are this object's from now on.
        """
        self._template, self._threads = template, threads
        self._sock, self._control = sock, control
        self._keys: list[_Key] = [(LOADER, 0), *((REPLICA, number) for number in range(num_replicas))]
        silence = template.config.silence_seconds
        self._lives: ProcessLives[_Key] = ProcessLives()
        for key in self._keys:
            self._lives.add(key, silence * (_LOADER_FACTOR if key[0] == LOADER else 1.0))
        self._children: dict[_Key, _Child] = {}
        self._held: dict[str, _Held] = {}
        self._standing: VersionStanding | None = None
        self._numbers = itertools.count(1)
        self._switches: dict[int, tuple[int, set[_Key]]] = {}  # ours: the loader's number, and who has not switched
        self._asked: _Asked | None = None
        self._next_askers: list[tuple[_Key, int]] = []
        self._past = ServingTotals()  # of replicas that are no more
        self._trying: Trying | None = None
        self._newest = ("", "")
        self._deaths: collections.Counter[str] = collections.Counter()
        self._published: set[str] = set()  # digests that were in a standing
        self._selector = selectors.DefaultSelector()
        self._wake, self._wake_side = socket.socketpair()
        self._wake_side.setblocking(False)
        self._selector.register(self._wake_side, selectors.EVENT_READ, None)
        self._is_ending = False
        self._is_up = threading.Event()
        self._trouble: SynclineError | None = None
        self._thread = threading.Thread(target=self._run, name="syncline serve keeper", daemon=True)

    @property
    def standing(self) -> VersionStanding | None:
        """How the versions stand; None before the first one answers."""
        return self._standing

    def start(self) -> None:
        """Returns when all replicas answer. Raises what keeps one of them from it."""
        self._thread.start()
        if not self._is_up.wait(_START_SECONDS):
            self._trouble = WaitTimeout(f"the replicas did not start within {_START_SECONDS:g} s")
        if self._trouble is not None:
            self.close()
            raise self._trouble

    @property
    def trouble(self) -> SynclineError | None:
        """Why all processes end without `close`; None: nothing has failed."""
        return self._trouble

    def close(self) -> None:
        """Answers open requests, then ends all processes. Also where `start` has not returned."""
        self._is_ending = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        for sock in (self._wake, self._wake_side):
            sock.close()

    def _run(self) -> None:
        last = time.monotonic()
        try:
            while not self._is_ending:
                self._step()
                now = time.monotonic()
                if now - last > 10 * _TICK_SECONDS:
                    self._lives.skipped(now - last)
                last = now
        except Exception as error:  # told to the thread that started this one
            log.exception("the keeper failed by a fault of syncline; please report it")
            self._trouble = SynclineError(
                f"the process that keeps the replicas failed ({type(error).__name__}: {error}), so all of them end; "
                "start the server again"
            )
        finally:
            try:
                self._end()
            finally:
                self._is_up.set()

    def _step(self) -> None:
        for ready, events in self._selector.select(_TICK_SECONDS):
            child: _Child | None = ready.data
            if child is None or self._children.get(child.key) is not child:
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(child)
            if events & selectors.EVENT_READ:
                self._read(child)
        now = time.monotonic()
        for child in list(self._children.values()):
            if child.process.poll() is not None:
                self._ended(child)
        if self._trouble is not None:
            self._is_ending = True
            return
        due = self._lives.due(now)
        for key, reason in due.kill:
            log.warning("%s is killed and starts again: %s", _named(key), reason)
            self._children[key].process.kill()
            self._children[key].process.wait()
            self._ended(self._children[key])
        for key in due.start:
            self._start(key)
        if self._asked is not None and now - self._asked.since > _TOTALS_SECONDS:
            self._asked.waits_for.clear()
            self._settle_totals()

    # Processes.

    def _start(self, key: _Key) -> None:
        role, number = key
        ours: socket.socket | None = None
        try:
            ours, theirs = socket_pair()
            ours.setblocking(False)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", f"syncline.serve.replicas.{role}", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=inherited_environment(thread_variables(self._threads[number])),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the keeper, which lets requests end
                )
        except OSError as error:
            if ours is not None:
                ours.close()
            self._lives.started(key, time.monotonic())
            pause = self._lives.ended(key, time.monotonic())
            log.warning("%s cannot be started: %s; the next attempt is in %.1f s", _named(key), error, pause)
            return
        child = _Child(key, process, MessageSocket(ours, TO_KEEPER))
        self._children[key] = child
        self._lives.started(key, time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ, child)
        changes: dict[str, Any] = {"number": number, "threads": self._threads[number]}
        if role == LOADER:
            refused = tuple(digest for digest, deaths in self._deaths.items() if deaths >= _MOST_DEATHS)
            changes |= {"standing": self._standing, "refused": refused, "newest": self._newest}
        given = self._control if role == LOADER else self._sock
        self._send(child, msgspec.structs.replace(self._template, **changes), [given.fileno()])
        if role == REPLICA:
            for held in self._held.values():
                self._send(child, Load(version=held.facts), _present(held.descriptor))
            if self._standing is not None:
                self._send(child, Switch(number=0, standing=self._standing))

    def _ended(self, child: _Child) -> None:
        """A process is no more: others are not waited for on its behalf, and it starts again."""
        while self._children.get(child.key) is child and self._read(child):
            pass  # its last words
        self._forget_child(child)
        key, code = child.key, child.process.wait()
        how = child.words.words if child.words is not None else f"it ended with code {code}"
        if not self._is_up.is_set():
            kind = StoreError if child.words is not None and child.words.is_store else ConfigError
            words = how if child.words is not None else f"{_named(key)} did not start: {how}; see what it wrote"
            self._trouble = self._trouble or kind(words)
            return
        pause = self._lives.ended(key, time.monotonic())
        log.warning("%s starts again%s: %s", _named(key), f" in {pause:.1f} s" if pause else "", how)
        if key[0] == LOADER:
            self._loader_ended()
        else:
            self._past = added_up([self._past, child.totals.ended()], self._loaded())
            self._without(key)

    def _forget_child(self, child: _Child) -> None:
        if self._children.get(child.key) is not child:
            return
        del self._children[child.key]
        self._selector.unregister(child.link.sock)
        child.link.close()
        for _, descriptors in child.outbox:
            _close(descriptors)

    def _send(self, child: _Child, message: FromKeeper, descriptors: Iterable[int] = ()) -> None:
        child.outbox.append((message, [os.dup(descriptor) for descriptor in descriptors]))
        self._flush(child)

    def _flush(self, child: _Child) -> None:
        """Sends what can be sent. What a process does not read waits; if it stays silent, it is killed."""
        events = selectors.EVENT_READ
        while child.outbox:
            message, descriptors = child.outbox[0]
            try:
                child.link.send(message, descriptors)
            except BlockingIOError:
                events |= selectors.EVENT_WRITE
                break
            except OSError:
                break  # it is gone, which the next look finds
            child.outbox.popleft()
            _close(descriptors)
        self._selector.modify(child.link.sock, events, child)

    def _read(self, child: _Child) -> bool:
        """Takes a message, if there is one."""
        try:
            received = child.link.receive()
        except BlockingIOError:
            return False
        except (SynclineError, msgspec.MsgspecError) as error:
            log.warning("%s is killed: it sent an invalid message: %s", _named(child.key), error)
            child.process.kill()
            return False
        if received is None:
            # No end of the process is waited for: one that closed its socket cannot work any more.
            child.process.kill()
            self._selector.modify(child.link.sock, selectors.EVENT_WRITE, child)
            return False
        self._heard(child, *received)
        return True

    def _replicas(self, *, up: bool = False) -> list[_Child]:
        return [
            child for key, child in self._children.items() if key[0] == REPLICA and (not up or self._lives.is_up(key))
        ]

    def _heard(self, child: _Child, message: ToKeeper, descriptors: list[int]) -> None:
        key = child.key
        if not isinstance(message, OfferVersion):
            _close(descriptors)
        match message:
            case Beat():
                self._lives.heard(key, time.monotonic())
            case Up():
                self._up(key)
            case Failed():
                child.words = message
            case Loaded(digest=digest, refusal=refusal):
                held = self._held.get(digest)
                if held is not None and not held.is_answered:
                    held.waits_for.discard(key)
                    self._settle_offer(held, refusal and f"{_named(key)}: {refusal}")
            case Switched(number=number):
                self._switched(number, key)
            case Totals(number=number, totals=totals):
                child.totals = totals
                if self._asked is not None and self._asked.number == number:
                    self._asked.waits_for.discard(key)
                    self._settle_totals()
            case AskTotals(number=number):
                self._next_askers.append((key, number))
                self._collect_totals()
            case Trying():
                self._trying = message if message.digest else None
                if message.digest:
                    self._newest = (message.name, message.digest)
            case OfferVersion(version=version):
                self._offered(version, descriptors)
            case Publish(number=number, standing=standing):
                self._publish(number, standing)

    def _up(self, key: _Key) -> None:
        self._lives.up(key, time.monotonic())
        if not self._is_up.is_set():
            if all(self._lives.is_up(one) for one in self._keys):
                self._is_up.set()
        else:
            log.info("%s is back", _named(key))

    def _without(self, key: _Key) -> None:
        """This replica answers no question that was put to it."""
        for held in list(self._held.values()):
            if key in held.waits_for:
                held.waits_for.discard(key)
                self._settle_offer(held, "")
        for number in list(self._switches):
            self._switched(number, key)
        if self._asked is not None:
            self._asked.waits_for.discard(key)
            self._settle_totals()

    # Versions.

    def _offered(self, version: VersionFacts, descriptors: list[int]) -> None:
        if (old := self._held.get(version.digest)) is not None:
            if self._standing is not None and any(one.digest == version.digest for one in self._standing.kept):
                _close(descriptors)  # of a loader that did not know
                old.is_answered = False
                self._settle_offer(old, "")
                return
            self._forget(version.digest)
        descriptor = descriptors[0] if descriptors else None
        waits_for = {child.key for child in self._replicas(up=True)}
        held = self._held[version.digest] = _Held(version, descriptor, waits_for)
        for child in self._replicas():
            self._send(child, Load(version=version), _present(descriptor))
        self._settle_offer(held, "")

    def _settle_offer(self, held: _Held, refusal: str) -> None:
        if held.is_answered or (held.waits_for and not refusal):
            return
        held.is_answered = True
        if refusal:
            self._forget(held.facts.digest)
        self._tell_loader(OfferAnswer(digest=held.facts.digest, refusal=refusal))

    def _forget(self, digest: str) -> None:
        held = self._held.pop(digest)
        _close(_present(held.descriptor))
        for child in self._replicas():
            self._send(child, Forget(digest=digest))

    def _publish(self, number: int, standing: VersionStanding) -> None:
        self._standing = standing
        ours = next(self._numbers)
        self._switches[ours] = (number, {child.key for child in self._replicas(up=True)})
        for child in self._replicas():
            self._send(child, Switch(number=ours, standing=standing))
        kept = {one.digest for one in standing.kept}
        for digest in list(self._held):
            if digest not in kept and digest in self._published:
                self._forget(digest)
        self._published |= kept
        self._published &= self._held.keys()
        self._switched(ours, (REPLICA, -1))

    def _switched(self, ours: int, key: _Key) -> None:
        if ours not in self._switches:
            return
        number, waits_for = self._switches[ours]
        waits_for.discard(key)
        if not waits_for:
            del self._switches[ours]
            self._tell_loader(Published(number=number))

    def _tell_loader(self, message: FromKeeper) -> None:
        child = self._children.get((LOADER, 0))
        if child is not None:
            self._send(child, message)

    def _loader_ended(self) -> None:
        """What it offered and did not publish is forgotten; its successor finds it again."""
        self._switches.clear()
        for digest in list(self._held.keys() - self._published):
            self._forget(digest)
        if self._trying is None:
            return
        self._deaths[self._trying.digest] += 1
        if self._deaths[self._trying.digest] == _MOST_DEATHS:
            log.warning("version %s is refused: %d loaders have died at it", self._trying.name, _MOST_DEATHS)
        while len(self._deaths) > _MOST_REFUSED:
            del self._deaths[next(iter(self._deaths))]
        self._trying = None

    # Totals.

    def _loaded(self) -> list[str]:
        return [one.name for one in self._standing.kept] if self._standing is not None else []

    def _collect_totals(self) -> None:
        """One round at a time. Who asks during a round gets the next one: this one may have begun before."""
        if self._asked is not None or not self._next_askers:
            return
        askers, self._next_askers = self._next_askers, []
        waits_for = {child.key for child in self._replicas(up=True)}
        self._asked = _Asked(next(self._numbers), time.monotonic(), waits_for, askers)
        for child in self._replicas(up=True):
            if not child.outbox:  # else it reads nothing now
                self._send(child, TellTotals(number=self._asked.number))
        self._settle_totals()

    def _settle_totals(self) -> None:
        if self._asked is None or self._asked.waits_for:
            return
        asked, self._asked = self._asked, None
        totals = added_up([self._past, *(child.totals for child in self._replicas())], self._loaded())
        for key, number in asked.askers:
            child = self._children.get(key)
            if child is not None:
                self._send(child, TotalsOfAll(number=number, totals=totals, processes=self.processes()))
        self._collect_totals()

    def processes(self) -> tuple[ProcessFacts, ...]:
        """Those that run now."""
        return tuple(
            ProcessFacts(
                role=key[0],
                number=key[1],
                pid=child.process.pid,
                is_up=self._lives.is_up(key),
                num_restarts=self._lives.num_restarts(key),
            )
            for key, child in sorted(self._children.items())
        )

    # The end.

    def _end(self) -> None:
        """Ends all processes, also after a fault. What they were not told yet does not matter any more."""
        self._sock.close()  # what waits there is accepted by replicas, as long as they have it
        self._selector.unregister(self._wake_side)  # it stays readable
        for child in list(self._children.values()):
            for _, descriptors in child.outbox:
                _close(descriptors)
            child.outbox.clear()
            self._send(child, EndServing())
        deadline = time.monotonic() + self._template.config.drain_seconds + _LATE_SECONDS
        while self._children:
            for ready, events in self._selector.select(_TICK_SECONDS):
                ending: _Child = ready.data
                if self._children.get(ending.key) is not ending:
                    continue
                try:
                    if events & selectors.EVENT_WRITE:
                        self._flush(ending)
                    if events & selectors.EVENT_READ:
                        self._read(ending)
                except Exception:  # what it says need not be understood now
                    log.debug("a message at the end was not handled", exc_info=True)
            for child in list(self._children.values()):
                if time.monotonic() > deadline:
                    child.process.kill()
                    child.process.wait()
                if child.process.poll() is not None:
                    self._forget_child(child)
        for digest in list(self._held):
            self._forget(digest)
        self._control.close()


def thread_variables(threads: int) -> dict[str, str]:
    """The environment of a process whose libraries compute with so many threads. What the user has set stays, but for
    OMP_NUM_THREADS: the replicas share that number.
    """
    said = environment_names(_THREAD_VARIABLES) - {"OMP_NUM_THREADS"}
    return {name: str(threads) for name in _THREAD_VARIABLES if name not in said}


def _named(key: _Key) -> str:
    return f"replica {key[1]}" if key[0] == REPLICA else "the loader"


def _present(descriptor: int | None) -> list[int]:
    return [descriptor] if descriptor is not None else []


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
