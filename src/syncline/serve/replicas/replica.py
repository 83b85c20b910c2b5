"""A replica: answers requests with versions whose weights lie in memory that all replicas map."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading

from syncline.errors import StoreError, SynclineError
from syncline.serve.answering import Answering, inputs_of, limit_threads
from syncline.serve.datatypes import RequestError
from syncline.serve.metrics import ServingTotals
from syncline.serve.model import LoadedModel, ModelFile
from syncline.serve.replicas.link import fitting
from syncline.serve.replicas.messages import (
    Failed,
    Forget,
    FromKeeper,
    Load,
    Loaded,
    SetUp,
    Switch,
    Switched,
    TellTotals,
    Totals,
    TotalsOfAll,
    Up,
)
from syncline.serve.replicas.process import KeptProcess, main
from syncline.serve.shared_weights import mapped
from syncline.serve.versions import Version, VersionFacts, Versions, VersionStanding

log = logging.getLogger("syncline.serve")

_TOTALS_SECONDS = 2.0


class ServingReplica(KeptProcess):
    """Loads and switches versions as its keeper says, and answers with them."""

    named = "replica {}"

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._versions: Versions[Version] = Versions()
        self._known: dict[str, Version] = {}
        self._file: ModelFile | None = None
        self._answering: Answering | None = None
        self._listener: socket.socket | None = None
        self._is_up = False
        self._trial_seconds = self._call_seconds = 0.0
        self._switching = threading.Lock()
        self._num_switch = 0  # of the newest one that was followed

    def set_up(self, message: SetUp, descriptors: list[int]) -> None:
        (descriptor,) = descriptors
        self._listener = socket.socket(fileno=descriptor)
        self._file = ModelFile(message.model)
        limit_threads(message.threads)
        self._file.place_on(message.config.device, message.number)
        self._trial_seconds, self._call_seconds = message.config.trial_seconds, message.config.call_seconds
        self._answering = Answering(
            message.config,
            self._file,
            inputs_of(self._file, message.config),
            self._versions,
            name=message.name,
            token=message.token,
            guard="",  # the loader has checked it
            all_totals=self._all_totals,
            on_hang=self._end_hanging,
        )

    def take(self, message: FromKeeper, descriptors: list[int]) -> None:
        match message:
            case Load(version=version):
                refusal = self._load(version, descriptors)
                self.link.send(Loaded(digest=version.digest, refusal=refusal))
            case Forget(digest=digest):
                self._known.pop(digest, None)
            case Switch(number=number, standing=standing):
                if missing := {one.digest for one in standing.kept} - self._known.keys():
                    names = [one.name for one in standing.kept if one.digest in missing]
                    raise StoreError(f"this replica cannot load version {', '.join(names)}, which others serve")
                self._switch(number, standing)
                if not self._is_up:
                    self._begin()
                self.link.send(Switched(number=number))
            case _:
                raise AssertionError(message)

    def take_at_once(self, message: FromKeeper) -> bool:
        match message:
            case TellTotals(number=number):
                totals = self._answering.totals() if self._answering is not None else ServingTotals()
                self.link.send(Totals(number=number, totals=totals))
            case Switch(number=number, standing=standing):
                # The main thread may be loading another version for long.
                if not self._is_up or not {one.digest for one in standing.kept} <= self._known.keys():
                    return False
                self._switch(number, standing)
                self.link.send(Switched(number=number))
            case _:
                return False
        return True

    def _switch(self, number: int, standing: VersionStanding) -> None:
        """One that comes after a newer one changes nothing."""
        with self._switching:
            if number >= self._num_switch:
                self._num_switch = number
                self._versions.follow(standing, self._known)

    def _end_hanging(self) -> None:
        """A call of the model cannot be ended, so the process is: its successor answers."""
        self.link.send(Failed(words=f"the model has not returned from a call for {self._call_seconds:g} s"))
        self._end()

    def _load(self, version: VersionFacts, descriptors: list[int]) -> str:
        """'', or why this version cannot answer here."""
        assert self._file is not None and self._answering is not None
        file, trial = self._file, self._answering.trial

        def load() -> LoadedModel:
            return file.load(weights, version.where, in_place=True)

        try:
            weights = mapped(descriptors[0]) if descriptors else None
            model = trial.passed(load, version.name, version.where, self._trial_seconds)
        except Exception as error:  # ours, or the operator's code: it must not end one replica after the other
            said = fitting(str(error))
            is_ours = isinstance(error, SynclineError | RequestError)
            return (said if is_ours else f"{type(error).__name__}: {said}") or type(error).__name__
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._known[version.digest] = Version(version.name, version.digest, version.where, version.step, model)
        return ""

    def _begin(self) -> None:
        assert self._answering is not None and self._listener is not None
        self._answering.start_batches(self.stack)
        self._answering.listen(self._listener, self.stack, shares_port=True)
        self.link.beat_while(_LoopProbe(self._answering).works)
        self._is_up = True
        self.link.send(Up())

    async def _all_totals(self) -> tuple[ServingTotals, int]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TotalsOfAll] = loop.create_future()

        def settle(answer: TotalsOfAll) -> None:
            if not future.done():
                future.set_result(answer)

        def answered(answer: TotalsOfAll) -> None:
            loop.call_soon_threadsafe(settle, answer)

        number = self.ask_totals(answered)
        try:
            async with asyncio.timeout(_TOTALS_SECONDS):
                answer = await future
        except TimeoutError:
            raise RequestError(503, "the process that adds up all replicas does not answer", 1.0) from None
        finally:
            self.forget_question(number)
        return answer.totals, sum(one.role == "replica" and one.is_up for one in answer.processes)


class _LoopProbe:
    """Whether the event loop has answered the last question, and the model returns from its calls."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._answered = threading.Event()
        self._answered.set()

    def works(self) -> bool:
        if not self._answered.is_set() or self._answering.hangs:
            return False
        self._answered.clear()
        self._answering.call_soon(self._answered.set)
        return True


if __name__ == "__main__":
    main(ServingReplica)
