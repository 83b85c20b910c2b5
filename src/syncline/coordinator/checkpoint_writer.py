"""A save after its cut: everybody writes what is theirs, the manifest comes last, then the old ones go."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from syncline import faults
from syncline.coordinator.job import JobContext
from syncline.coordinator.metrics import StopRules
from syncline.coordinator.restore import ResumeService, checkpoint_of
from syncline.coordinator.validation import BestCheckpoint
from syncline.core.checkpoint.manifest import Manifest, SavedFile, SavedScript, SavedSlice
from syncline.core.checkpoint.schedule import Checkpoint
from syncline.core.checkpoint.soundness import number_in
from syncline.core.layout import Segment
from syncline.core.leasing.leases import LeaseState
from syncline.core.slice_state import Identity
from syncline.core.wire.checkpoints import WriteMarked, WriteScript, WrittenMarked, WrittenScript
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, DamagedError, ProtocolError, StoreError, SynclineError, WaitTimeout
from syncline.net.rpc import Call
from syncline.store import checkpoints
from syncline.store.folders import Folder, open_folder
from syncline.store.mirror import copy_checkpoint
from syncline.store.trouble import MissingError

#: For scripts' states of workers other than the chief, after all slices are written.
SCRIPT_SECONDS = 60.0
_LOOK_SECONDS = 0.05


@dataclasses.dataclass
class Taken:
    """What is known of a job at a cut, apart from what is in its slices."""

    number: int
    servers: list[str]
    clocks: dict[Identity, int]
    workers: dict[str, int]  # with their incarnations
    segments: tuple[Segment, ...]
    leases: LeaseState
    num_updates: int
    versions: int
    seconds: float
    gate_seconds: float = 0.0  # from the first gate that was told to close to the last that has opened


class CheckpointWriter:
    """Writes checkpoints, in the thread of the save."""

    def __init__(self, job: JobContext, stop_rules: StopRules, best: BestCheckpoint, resume: ResumeService) -> None:
        self._job, self._stop_rules, self._best, self._resume = job, stop_rules, best, resume
        self._mirror = CheckpointMirror(job)
        self._newest: Manifest | None = None  # of the checkpoint that was made last
        self._has_said = False  # what the saves of now lack

    @property
    def root(self) -> str:
        return open_folder(self._job.config.checkpoint).url

    def write(self, taken: Taken, workers: Collection[str], chief: str, turn: int = 0) -> Checkpoint:
        """The checkpoint, when it exists. `workers`: those that have noted their scripts' states. `turn`: of the
        validation that goes with it, whose readings are in it.

        ConnectionLost: a member has gone meanwhile; whatever the reason, nothing is left behind.
        """
        config = self._job.config
        root = open_folder(config.checkpoint)
        root.make()
        step = taken.num_updates * config.sync_every
        saves = self._job.membership.state.saves
        folder = checkpoints.begin(root, checkpoints.next_number(root), step, saves.lineage, saves.token)
        try:
            with self._job.lock:
                saves.open_folder = folder.url
                self._job.keep()
            manifest = self._gather(taken, folder, workers, chief, step)
            faults.reach("save.answered")
            _check_is_here(folder, manifest)
            manifest = self._best.with_readings(manifest, turn)
            digest = checkpoints.write_manifest(folder, manifest)
            self._newest = manifest
        except BaseException:
            _remove(folder, saves.token)
            raise
        return checkpoint_of(folder, manifest, digest)

    def _gather(self, taken: Taken, folder: Folder, workers: Collection[str], chief: str, step: int) -> Manifest:
        marked = self._ask_servers(taken, folder)
        lives = {name: (name, taken.workers.get(name, 0)) for name in workers}
        clocks = {name: taken.clocks[life] for name, life in lives.items() if life in taken.clocks}
        scripts = self._ask_workers(taken, folder, clocks)
        files: list[SavedFile] = []
        slices: list[SavedSlice] = []
        for answer in self._written(marked):
            files.append(answer.file)
            slices += answer.slices
            if answer.num_waited:
                self._job.event(
                    f"{answer.num_waited} updates waited for memory during a save; --save-memory allows it more"
                )
        scripts |= self._ask_workers(taken, folder, _clocks_in(slices, taken, lives.keys() - clocks.keys()))
        found = self._scripts(scripts, chief)
        wanted = [part.id for segment in taken.segments for part in segment.slices]
        if sorted(part.id for part in slices) != sorted(wanted):
            raise ProtocolError("servers have written other slices than the job has")
        state, config = self._job.membership.state, self._job.config
        return Manifest(
            name=folder.name,
            number=number_in(folder.name) or 0,
            lineage=state.saves.lineage,
            job=self._job.job_id,
            step=step,
            seconds=taken.seconds,
            saved_at=time.time(),
            syncline=_version_of("syncline"),
            torch=_version_of("torch"),
            segments=taken.segments,
            files=tuple(files),
            slices=tuple(sorted(slices, key=lambda part: part.id)),
            scripts=tuple(found),
            leases=taken.leases,
            config=msgspec.to_builtins(config),
        )

    # -- asking -------------------------------------------------------------------------------------------

    def _ask_servers(self, taken: Taken, folder: Folder) -> dict[str, Call]:
        return {
            name: self._call(name, WriteMarked(taken.number, folder.url, f"{name}.safetensors"))
            for name in taken.servers
        }

    def _ask_workers(self, taken: Taken, folder: Folder, clocks: Mapping[str, int]) -> dict[str, Call]:
        calls: dict[str, Call] = {}
        for name, clock in clocks.items():
            message = WriteScript(taken.number, clock, folder.url, f"{name}.script.safetensors")
            try:
                calls[name] = self._call(name, message)
            except ConnectionLost as error:
                self._lacks(name, error)
        return calls

    def _call(self, name: str, message: Message) -> Call:
        with self._job.lock:
            endpoint = self._job.endpoints.get(name)
        if endpoint is None:
            raise ConnectionLost(f"{name} is not there")
        return endpoint.call(message)

    def _written(self, calls: Mapping[str, Call]) -> Iterator[WrittenMarked]:
        until = time.monotonic() + self._job.config.wait_seconds
        for name, call in calls.items():
            while not call.arrives(_LOOK_SECONDS):
                self._check_goes_on()
                with self._job.lock:
                    if any(other not in self._job.membership.state.members for other in calls):
                        raise ConnectionLost("a server was lost in the middle of it")
                if time.monotonic() > until:
                    raise WaitTimeout(f"{name} has not written its slices within {self._job.config.wait_seconds:g} s")
            answer = call.wait(0)
            if not isinstance(answer, WrittenMarked):
                raise ProtocolError(f"{name} answered {type(answer).__name__} to WriteMarked")
            yield answer

    def _scripts(self, calls: Mapping[str, Call], chief: str) -> list[SavedScript]:
        """Of all workers that have them; a save without one is still a save."""
        found = []
        began = time.monotonic()
        for name, call in calls.items():
            patience = self._job.config.wait_seconds if name == chief else SCRIPT_SECONDS
            try:
                while not call.arrives(_LOOK_SECONDS):
                    if self._job.over.is_set():
                        raise ConnectionLost("the job has ended")
                    if time.monotonic() - began > patience:
                        raise WaitTimeout(f"it did not come within {patience:g} s")
                answer = call.wait(0)
                if isinstance(answer, WrittenScript):
                    found.append(answer.script)
                    self._tell_between(answer)
            except SynclineError as error:
                self._lacks(name, error)
        return sorted(found, key=lambda script: script.worker)

    def _lacks(self, name: str, error: SynclineError) -> None:
        self._job.event(f"the state of {name}'s script is not in this save: {error}")

    def _tell_between(self, answer: WrittenScript) -> None:
        if answer.clock > answer.script.clock:
            self._job.event(
                f"this save lies in the middle of a batch of {answer.script.worker}'s: of {answer.clock} commits it "
                f"has {answer.script.clock}; whoever takes it up goes on with the next batch"
            )

    def _check_goes_on(self) -> None:
        if self._job.over.is_set():
            raise StoreError("the job has ended")

    # -- afterwards ---------------------------------------------------------------------------------------

    def tidy(self, made: Checkpoint, *, waits: bool = False) -> None:
        """It exists: the pointer to it, a second copy, and older ones go. No trouble here makes it a failure."""
        saves = self._job.membership.state.saves
        try:
            root = open_folder(made.root)
            checkpoints.point(root, "last", made.name, step=made.step)
            if self._newest is not None:
                self._best.consider(made, self._newest)
            average = self._stop_rules.rules.average
            keep = max(self._job.config.keep, average.last if average is not None else 0)
            checkpoints.prune(root, keep, saves.lineage, self._needed(made), token=saves.token)
        except StoreError as error:
            self._job.event(f"{made.name} is saved, but: {error}")
        except Exception as error:  # a bug of ours, or of a driver, costs the order of the folder, not the job
            self._job.event(f"{made.name} is saved, but: {type(error).__name__}: {error}")
        self._mirror.request(made)
        if waits:
            self._mirror.wait(self._job.config.wait_seconds)

    def _needed(self, made: Checkpoint) -> set[str]:
        """What the job was taken up from stays as long as anything is in it that is in no other."""
        with self._job.lock:
            known, lacking = self._job.membership.state.saves.taken_up, self._resume.unregistered()
        if known is None or not lacking:
            return set()
        if not self._has_said:
            self._has_said = True
            self._job.event(
                f"{made.name} is without {lacking[0]!r}, which {known.name} has and the script has not registered "
                f"yet: {known.name} is kept until then"
            )
        return {known.name}

    def close(self) -> None:
        self._mirror.close()


def _check_is_here(folder: Folder, manifest: Manifest) -> None:
    """What others have written is seen from here too: every file is there, with its size and its header."""
    try:
        checkpoints.check_files(folder, manifest)
    except StoreError as error:
        raise StoreError(f"{error}; --checkpoint must be a folder that all hosts share, or a store") from error


def _clocks_in(slices: Iterable[SavedSlice], taken: Taken, workers: Collection[str]) -> dict[str, int]:
    """Of workers that take part no more, and of which servers tell nothing at a cut: what is in the slices."""
    found = dict.fromkeys(sorted(workers), 0)
    for part in slices:
        for name, incarnation, clock in part.clocks:
            if name in found and taken.workers.get(name) == incarnation:
                found[name] = max(clock, found[name])
    return found


def adopt(url: str, token: str, say: Callable[[str], None]) -> Checkpoint | None:
    """What a coordinator that died had under way: a checkpoint, if its manifest was there; else it is removed.

    Where that cannot be told, since its store gives trouble, it stays as it is, and that is said.
    """
    if not url:
        return None
    try:
        folder = open_folder(url)
        manifest, digest = checkpoints.read_manifest(folder)
    except (MissingError, DamagedError):
        _remove(folder, token)
        return None
    except StoreError as error:
        say(f"the coordinator was away in the middle of a save; what there is of it stays: {error}")
        return None
    return checkpoint_of(folder, manifest, digest)


def _remove(folder: Folder, token: str) -> None:
    try:
        checkpoints.abandon(folder, token)
    except StoreError:
        return  # the next save removes what has no manifest


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class CheckpointMirror:
    """One copy at a time, in a thread of its own; of those that wait only the newest is made."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._change = threading.Condition()
        self._next: Checkpoint | None = None
        self._is_busy = self._closed = False

    def request(self, made: Checkpoint) -> None:
        """This checkpoint is to be copied, if there is a mirror."""
        if not self._job.config.checkpoint_mirror:
            return
        with self._change:
            self._next = made
            if not self._is_busy:
                self._is_busy = True
                threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Until everything is copied, for so long at most."""
        until = time.monotonic() + seconds
        with self._change:
            while self._is_busy and not self._closed and time.monotonic() < until:
                self._change.wait(0.1)

    def _run(self) -> None:
        while True:
            with self._change:
                made, self._next = self._next, None
                if made is None or self._closed:
                    self._is_busy = False
                    self._change.notify_all()
                    return
            self._copy(made)

    def _copy(self, made: Checkpoint) -> None:
        config = self._job.config
        try:
            source, target = open_folder(made.root), open_folder(config.checkpoint_mirror)
            copy_checkpoint(source, target, made.name)
            checkpoints.point(target, "last", made.name, step=made.step)
            best = checkpoints.pointed(source, "best")
            kept = {best["checkpoint"]} if best else set()
            if best:
                copy_checkpoint(source, target, best["checkpoint"])
                checkpoints.point(target, "best", **best)
            saves = self._job.membership.state.saves
            checkpoints.prune(target, config.keep, saves.lineage, kept, token=saves.token)
        except StoreError as error:
            self._job.event(f"{made.name} has no second copy: {error}; the job goes on")
        except Exception as error:  # a bug of ours costs the copy, not the job
            self._job.event(f"{made.name} has no second copy: {type(error).__name__}: {error}")

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
