"""The loader: reads and tries new versions, shares their weights, and decides which version answers.

It runs the operator's code on untried versions, which may end a process. So it is a process of its own, which answers
no requests.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from typing import Any

from syncline.errors import ConfigError, StoreError
from syncline.serve.answering import inputs_of, limit_threads
from syncline.serve.control import Control, ControlRequest
from syncline.serve.following import JobSource, source_of
from syncline.serve.loading import VersionLoading, VersionTrial, keep_looking
from syncline.serve.model import LoadedModel, ModelFile
from syncline.serve.reading import Candidate, VersionSource
from syncline.serve.replicas.messages import (
    FromKeeper,
    OfferAnswer,
    OfferVersion,
    Publish,
    Published,
    SetUp,
    TotalsOfAll,
    Trying,
    Up,
)
from syncline.serve.replicas.process import Awaited, KeptProcess, main
from syncline.serve.shared_weights import mapped, share
from syncline.serve.standing import change, told
from syncline.serve.versions import VersionFacts, Versions

log = logging.getLogger("syncline.serve")

_LATE_SECONDS = 60.0  # beyond the trial of a version, for replicas that load it
_NO_LIMIT_SECONDS = 600.0  # where a trial may take any time, replicas may take so much
_SECONDS = 60.0


class VersionLoader(KeptProcess):
    """Brings new versions to all replicas, and carries out what `serve-ctl` asks for."""

    named = "loader"

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._versions: Versions[VersionFacts] = Versions()
        self._publishing = threading.Lock()  # one change after another
        self._publish_numbers = itertools.count(1)
        self._waiting: dict[str | int, Awaited] = {}
        self._file: ModelFile | None = None
        self._trial: VersionTrial | None = None
        self._loading: VersionLoading | None = None
        self._source: VersionSource | None = None
        self._trial_seconds = 0.0
        self._name = self._url = ""

    def set_up(self, message: SetUp, descriptors: list[int]) -> None:
        (descriptor,) = descriptors
        config = message.config
        self._name, self._url = message.name, message.url
        self._versions = Versions(config.keep)
        self._trial_seconds = config.trial_seconds
        self._file = ModelFile(message.model)
        limit_threads(message.threads)
        self._file.place_on(config.device, message.number)
        inputs = inputs_of(self._file, config)
        self._trial = VersionTrial(self._file, inputs, list, guard=config.guard)  # replicas have recent requests
        source = source_of(message.weights, config.pick, message.follow, message.name, copies=False)
        self._source = source
        if source is not None:
            source.resume(*message.newest)
        loading = VersionLoading(source, self._versions, self._bring, refused=message.refused)
        self._loading = loading
        if message.standing is not None:
            found = {one.digest: one for one in message.standing.kept}
            self._versions.follow(message.standing, found)
        control = Control(socket.socket(fileno=descriptor), self._answer)
        # The first version waits for answers, which come in the thread that reads.
        if message.standing is None:
            loading.first(self._file.where)
        keep_looking(source, loading.look, config.refresh)
        control.start()
        self.link.send(Up())

    def take(self, message: FromKeeper, descriptors: list[int]) -> None:
        raise AssertionError(message)

    def take_at_once(self, message: FromKeeper) -> bool:
        match message:
            case OfferAnswer(digest=digest, refusal=refusal):
                self._give(digest, refusal)
            case Published(number=number):
                self._give(number, "")
            case _:
                return False
        return True

    def _give(self, key: str | int, value: object) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.give(value)

    def _bring(self, candidate: Candidate) -> None:
        """StoreError: this version must not answer."""
        assert self._file is not None and self._trial is not None and self._loading is not None
        facts = VersionFacts(candidate.name, candidate.digest, candidate.where, candidate.step)
        self.link.send(Trying(name=facts.name, digest=facts.digest))
        file, trial = self._file, self._trial
        memory = None
        try:
            saved = file.own_weights() if candidate.is_as_made else candidate.read()
            memory = share(saved) if saved is not None else None
            weights = mapped(memory.fd) if memory is not None else None

            def load() -> LoadedModel:
                return file.load(weights, facts.where, in_place=True)

            trial.passed(load, facts.name, facts.where, self._trial_seconds)
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        finally:
            self.link.send(Trying(name=facts.name, digest=""))
        answer = self._waiting[facts.digest] = Awaited()
        self.link.send(OfferVersion(version=facts), [memory.fd] if memory is not None else [])
        if memory is not None:
            memory.close()
        seconds = self._trial_seconds + _LATE_SECONDS if self._trial_seconds else _NO_LIMIT_SECONDS
        self._wait_for(facts.digest, answer, f"not all replicas loaded version {facts.name}", seconds)
        if answer.value:
            raise StoreError(str(answer.value))
        with self._publishing:
            role = self._versions.add(facts)
            self._publish()
        self._loading.say_loaded(facts, role)

    def _publish(self) -> None:
        """Returns when all replicas answer as the versions stand now."""
        number = next(self._publish_numbers)
        answer = self._waiting[number] = Awaited()
        self.link.send(Publish(number=number, standing=self._versions.standing()))
        self._wait_for(number, answer, "not all replicas switched", _SECONDS)

    def _wait_for(self, key: str | int, answer: Awaited, what: str, seconds: float) -> None:
        try:
            answer.wait_for(what, seconds)
        finally:
            self._waiting.pop(key, None)

    def _answer(self, request: ControlRequest) -> dict[str, Any]:
        if request.verb == "load":
            assert self._loading is not None
            if reasons := self._loading.look():
                raise ConfigError("; ".join(reasons[:3]))
        elif request.verb != "status":
            with self._publishing:
                change(self._versions, request, is_followed=isinstance(self._source, JobSource))
                self._publish()
        counted = Awaited()
        question = self.ask_totals(counted.give)
        try:
            counted.wait_for("not all replicas gave their counts", _SECONDS)
        finally:
            self.forget_question(question)
        assert isinstance(counted.value, TotalsOfAll)
        return told(
            self._versions, counted.value.totals, self._name, self._url, self._source, counted.value.processes
        )


if __name__ == "__main__":
    main(VersionLoader)
