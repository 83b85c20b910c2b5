"""Writes a checkpoint after its snapshot: members write their parts, the manifest comes last, old ones go."""

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

#: How long a save waits for the scripts of workers other than the chief, after all slices are written.
SCRIPT_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclasses.dataclass
class SnapshotPoint:
    """What the coordinator knows of a job at a snapshot. The values are in the servers' slices."""

    number: int
    servers: list[str]
    clocks: dict[Identity, int]
    workers: dict[str, int]  # their incarnations
    segments: tuple[Segment, ...]
    leases: LeaseState
    num_updates: int
    versions: int
    seconds: float
    barrier_seconds: float = 0.0  # how long commits were held
    local_step: int = 0  # with --sync-every: steps of the worker that has made the most


class CheckpointWriter:
    """Writes checkpoints, in the thread of the save."""

    def __init__(self, job: JobContext, stop_rules: StopRules, best: BestCheckpoint, resume: ResumeService) -> None:
        self._job, self._stop_rules, self._best, self._resume = job, stop_rules, best, resume
        self._mirror = CheckpointMirror(job)
        self._newest: Manifest | None = None  # of the last checkpoint
        self._has_warned = False  # that saves lack parameters of the resumed checkpoint

    @property
    def root(self) -> str:
        """The folder of all checkpoints."""
        return open_folder(self._job.config.checkpoint).url

    def write(self, point: SnapshotPoint, workers: Collection[str], chief: str, turn: int = 0) -> Checkpoint:
        """Returns the checkpoint when all of it is written. After an error nothing is left behind; ConnectionLost: a
        member was lost, so a retry may succeed.

        `workers`: those that have noted the states of their scripts. `turn`: the validation whose readings go into
        the manifest.
        """
        config = self._job.config
        root = open_folder(config.checkpoint)
        root.make()
        step = (point.local_step or self._job.step()) if config.steps_locally else point.num_updates
        saves = self._job.membership.state.saves
        folder = checkpoints.begin(root, checkpoints.next_number(root), step, saves.lineage, saves.token)
        try:
            with self._job.lock:
                saves.open_folder = folder.url
                self._job.keep()
            manifest = self._gather(point, folder, workers, chief, step)
            faults.reach("save.answered")
            _check_is_visible(folder, manifest)
            manifest = self._best.with_readings(manifest, turn)
            digest = checkpoints.write_manifest(folder, manifest)
            self._newest = manifest
        except BaseException:
            _remove(folder, saves.token)
            raise
        return checkpoint_of(folder, manifest, digest)

    def _gather(
        self, point: SnapshotPoint, folder: Folder, workers: Collection[str], chief: str, step: int
    ) -> Manifest:
        """Lets all members write their parts, and returns the manifest."""
        marked = self._ask_servers(point, folder)
        lives = {name: (name, point.workers.get(name, 0)) for name in workers}
        clocks = {name: point.clocks[life] for name, life in lives.items() if life in point.clocks}
        scripts = self._ask_workers(point, folder, clocks)
        for name in sorted(name for name, life in point.workers.items() if (name, life) in point.clocks):
            if name not in workers:
                self._report_missing(name, "it came to no boundary between two batches in time")
        files: list[SavedFile] = []
        slices: list[SavedSlice] = []
        for answer in self._written(marked):
            files.append(answer.file)
            slices += answer.slices
            if answer.num_waited:
                self._job.event(
                    f"{answer.num_waited} updates waited for memory during a save; --save-memory allows it more"
                )
        scripts |= self._ask_workers(point, folder, _clocks_in(slices, point, lives.keys() - clocks.keys()))
        found = self._scripts(scripts, chief)
        expected = [part.id for segment in point.segments for part in segment.slices]
        if sorted(part.id for part in slices) != sorted(expected):
            raise ProtocolError("servers have written other slices than the job has")
        state, config = self._job.membership.state, self._job.config
        return Manifest(
            name=folder.name,
            number=number_in(folder.name) or 0,
            lineage=state.saves.lineage,
            job=self._job.job_id,
            step=step,
            seconds=point.seconds,
            saved_at=time.time(),
            syncline=_version_of("syncline"),
            torch=_version_of("torch"),
            segments=point.segments,
            files=tuple(files),
            slices=tuple(sorted(slices, key=lambda part: part.id)),
            scripts=tuple(found),
            leases=point.leases,
            config=msgspec.to_builtins(config),
        )

    # -- calls --------------------------------------------------------------------------------------------

    def _ask_servers(self, point: SnapshotPoint, folder: Folder) -> dict[str, Call]:
        return {
            name: self._call(name, WriteMarked(point.number, folder.url, f"{name}.safetensors"))
            for name in point.servers
        }

    def _ask_workers(self, point: SnapshotPoint, folder: Folder, clocks: Mapping[str, int]) -> dict[str, Call]:
        """Asks workers to write the state that their scripts had at these clocks."""
        calls: dict[str, Call] = {}
        for name, clock in clocks.items():
            message = WriteScript(point.number, clock, folder.url, f"{name}.script.safetensors")
            try:
                calls[name] = self._call(name, message)
            except ConnectionLost as error:
                self._report_missing(name, error)
        return calls

    def _call(self, name: str, message: Message) -> Call:
        with self._job.lock:
            endpoint = self._job.endpoints.get(name)
        if endpoint is None:
            raise ConnectionLost(f"{name} is not there")
        return endpoint.call(message)

    def _written(self, calls: Mapping[str, Call]) -> Iterator[WrittenMarked]:
        """Yields the answers of the servers."""
        until = time.monotonic() + self._job.config.wait_seconds
        for name, call in calls.items():
            while not call.arrives(_POLL_SECONDS):
                self._check_not_over()
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
        """Returns the states of the scripts. A save may lack one."""
        found = []
        began = time.monotonic()
        for name, call in calls.items():
            patience = self._job.config.wait_seconds if name == chief else SCRIPT_SECONDS
            try:
                while not call.arrives(_POLL_SECONDS):
                    if self._job.over.is_set():
                        raise ConnectionLost("the job has ended")
                    if time.monotonic() - began > patience:
                        raise WaitTimeout(f"it did not come within {patience:g} s")
                answer = call.wait(0)
                if isinstance(answer, WrittenScript):
                    found.append(answer.script)
                    self._report_mid_batch(answer)
            except SynclineError as error:
                self._report_missing(name, error)
        return sorted(found, key=lambda script: script.worker)

    def _report_missing(self, name: str, error: SynclineError | str) -> None:
        self._job.event(f"the state of {name}'s script is not in this save: {error}")

    def _report_mid_batch(self, answer: WrittenScript) -> None:
        if answer.clock > answer.script.clock:
            self._job.event(
                f"this save is in the middle of a batch of {answer.script.worker}: it has {answer.script.clock} of "
                f"{answer.clock} commits; a job that resumes from it continues with the next batch"
            )

    def _check_not_over(self) -> None:
        if self._job.over.is_set():
            raise StoreError("the job has ended")

    # -- after a save -------------------------------------------------------------------------------------

    def tidy(self, made: Checkpoint, *, waits: bool = False) -> None:
        """After a save: moves the pointer `last`, considers it as the best, removes old checkpoints, starts the
        mirror.

        An error here does not fail the save. `waits`: returns when the mirror has a copy.
        """
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
        except Exception as error:  # our own bug, or a driver's: it costs the order of the folder, not the job
            self._job.event(f"{made.name} is saved, but: {type(error).__name__}: {error}")
        self._mirror.request(made)
        if waits:
            self._mirror.wait(self._job.config.wait_seconds)

    def _needed(self, made: Checkpoint) -> set[str]:
        """The checkpoint that the job was resumed from stays while it has parameters that no later one has."""
        with self._job.lock:
            known, lacking = self._job.membership.state.saves.resumed_from, self._resume.unregistered()
        if known is None or not lacking:
            return set()
        if not self._has_warned:
            self._has_warned = True
            self._job.event(
                f"{made.name} lacks {lacking[0]!r}, which the script has not registered yet; {known.name} has it and "
                "is kept until then"
            )
        return {known.name}

    def close(self) -> None:
        self._mirror.close()


def _check_is_visible(folder: Folder, manifest: Manifest) -> None:
    """Checks that the files of other hosts can be read here, with their sizes and headers."""
    try:
        checkpoints.check_files(folder, manifest)
    except StoreError as error:
        raise StoreError(f"{error}; --checkpoint must be a folder that all hosts share, or a store") from error


def _clocks_in(slices: Iterable[SavedSlice], point: SnapshotPoint, workers: Collection[str]) -> dict[str, int]:
    """The clocks of workers that are in no round now, by the slices: the servers leave them out at a snapshot."""
    found = dict.fromkeys(sorted(workers), 0)
    for part in slices:
        for name, incarnation, clock in part.clocks:
            if name in found and point.workers.get(name) == incarnation:
                found[name] = max(clock, found[name])
    return found


def adopt(url: str, token: str, say: Callable[[str], None]) -> Checkpoint | None:
    """Returns the checkpoint that a dead coordinator was writing, if its manifest is there; otherwise removes it.

    If the store gives an error, the folder stays as it is, and `say` reports it.
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
        say(f"the coordinator restarted during a save; the unfinished files stay: {error}")
        return None
    return checkpoint_of(folder, manifest, digest)


def _remove(folder: Folder, token: str) -> None:
    try:
        checkpoints.abandon(folder, token)
    except StoreError:
        return  # the next save removes folders without a manifest


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


class CheckpointMirror:
    """Copies checkpoints to a second place, in a thread of its own. Only the newest of those that wait is copied.

    Errors are reported and stop nothing.
    """

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._next: Checkpoint | None = None
        self._is_busy = self._closed = False

    def request(self, made: Checkpoint) -> None:
        """Copies this checkpoint, if the job has a mirror."""
        if not self._job.config.checkpoint_mirror:
            return
        with self._changed:
            self._next = made
            if not self._is_busy:
                self._is_busy = True
                threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Waits until everything is copied, up to this long."""
        until = time.monotonic() + seconds
        with self._changed:
            while self._is_busy and not self._closed and time.monotonic() < until:
                self._changed.wait(0.1)

    def _run(self) -> None:
        while True:
            with self._changed:
                made, self._next = self._next, None
                if made is None or self._closed:
                    self._is_busy = False
                    self._changed.notify_all()
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
            self._job.event(f"{made.name} has no second copy: {error}; the job continues")
        except Exception as error:  # our own bug: it costs the copy, not the job
            self._job.event(f"{made.name} has no second copy: {type(error).__name__}: {error}")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
