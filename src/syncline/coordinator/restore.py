"""Values that come from elsewhere: a job resumes from a checkpoint, or slices that all servers lost are restored."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NoReturn

from syncline.config import JobConfig
from syncline.coordinator.job import JobContext, ServerCalls
from syncline.coordinator.leases import LeaseService
from syncline.core.checkpoint.manifest import Manifest, SavedSlice
from syncline.core.checkpoint.restoring import is_no_older
from syncline.core.checkpoint.schedule import Checkpoint
from syncline.core.checkpoint.snapshot import ledger_to_resume
from syncline.core.codecs.named import NONE
from syncline.core.layout import Segment
from syncline.core.leasing.leases import LeaseState
from syncline.core.policy import parse_policy, policy_of
from syncline.core.slice_state import Copy, Identity, freshest, num_revoked
from syncline.core.stopping import from_checkpoint
from syncline.core.units import counted
from syncline.core.wire.checkpoints import AskResume, GivenResume, NoteScript, Resume
from syncline.core.wire.control import AskCopies, GiveCopies, GivenCopies, Host, Register
from syncline.core.wire.message import Message
from syncline.errors import ConnectionLost, DamagedError, LayoutError, StoreError, SynclineError, WaitTimeout
from syncline.net.rpc import Request
from syncline.store import checkpoints
from syncline.store.checkpoints import read_manifest
from syncline.store.folders import Folder, open_folder
from syncline.store.trouble import MissingError

_REMEDY = "start over beside it with --fresh, or say another --checkpoint"
#: How long workers may take to tell which copies they have.
_ASK_SECONDS = 5.0
#: A worker's name, and the copy of a slice that it has.
WorkerCopy = tuple[str, Copy]


class ResumeService:
    """The checkpoint that a job resumes from, if any."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._searched_for: tuple[str, str, bool] | None = None  # the settings of the last search
        self._is_searching = False
        self._chosen: checkpoints.Chosen | None = None
        self._leases = LeaseState()  # of the chosen checkpoint
        self._manifest: Manifest | None = None
        self._notes: dict[str, NoteScript] = {}  # the last one of each worker
        self._is_gone = False

    # -- choosing a checkpoint ----------------------------------------------------------------------------

    def is_chosen(self, config: JobConfig, then: Callable[[], None]) -> bool:
        """Under the lock: whether the checkpoint for these settings is chosen.

        If not, a thread searches, and calls `then` under the lock when it has finished.
        """
        wanted = (config.checkpoint, config.resume, config.fresh)
        if self._is_searching:
            return False
        if self._searched_for == wanted or not (config.resume or (config.checkpoint and not config.fresh)):
            return True
        self._searched_for, self._is_searching, self._chosen = wanted, True, None
        threading.Thread(target=self._search, args=(config, then), name="resume", daemon=True).start()
        return False

    def _search(self, config: JobConfig, then: Callable[[], None]) -> None:
        """Reads all of a checkpoint before it is chosen: this may take a while."""
        found, leases, failure = None, LeaseState(), ""
        try:
            found = checkpoints.choose(open_folder(config.resume or config.checkpoint), self._job.event)
            if found is None and config.resume:
                failure = f"--resume {config.resume}: there is no checkpoint to resume from"
            leases = ledger_to_resume(found.manifest.leases) if found is not None else leases
        except SynclineError as error:
            failure = str(error)
        except Exception as error:  # our own bug: the job must fail visibly, not hang
            failure = f"it has a bug: {type(error).__name__}: {error}"
        with self._job.lock:
            self._chosen, self._leases, self._is_searching = found, leases, False
            if failure:
                self._job.membership.fail("coordinator", failure)
            else:
                self._form(then)
        self._job.conclude()

    def _form(self, then: Callable[[], None]) -> None:
        """Under the lock: an error of `then` ends the job, since no caller would see it."""
        try:
            then()
        except SynclineError as error:
            self._job.membership.fail("coordinator", str(error))
        except Exception as error:
            self._job.membership.fail("coordinator", f"it has a bug: {type(error).__name__}: {error}")

    def apply_choice(self) -> None:
        """Under the lock, when the job forms: the job resumes from the chosen checkpoint, or starts from scratch."""
        state, config = self._job.membership.state, self._job.config
        state.saves.lineage, state.saves.token = secrets.token_hex(8), secrets.token_hex(8)
        found = self._chosen
        if found is None:
            return
        manifest = self._manifest = found.manifest
        state.saves.resumed_from = checkpoint_of(found.folder, manifest, found.digest)
        state.saves.lineage, state.saves.seconds = manifest.lineage, manifest.seconds
        state.leases = self._leases
        state.validations.floor = manifest.step
        state.steering = from_checkpoint(manifest.steering, manifest.seconds)
        self._job.event(f"resumes from {found.folder.url}: {describe(manifest, time.time())}")
        if config.policy != manifest.config.get("policy", config.policy):
            self._job.event(f"its policy was {manifest.config['policy']}, and is {config.policy} now")

    # -- registrations ------------------------------------------------------------------------------------

    def manifest(self) -> Manifest | None:
        """The manifest of the checkpoint that the job resumed from; a later coordinator reads it again.

        None without such a checkpoint, and after it was removed because nothing in it is needed any more.
        """
        known = self._job.membership.state.saves.resumed_from
        if known is not None and self._manifest is None and not self._is_gone:
            try:
                self._manifest, _ = checkpoints.read_manifest(open_folder(known.folder), known.digest)
            except (MissingError, DamagedError) as error:
                if not self._job.registry.layout.segments:
                    raise
                self._is_gone = True  # it was removed by --keep, once all of it was registered
                self._job.event(f"parameters registered from now on start with the values of the script: {error}")
        return self._manifest

    def check_registration(self, who: str, message: Register) -> None:
        """Raises LayoutError if the chief's parameters are not those of the checkpoint.

        Once some of the checkpoint is registered, the chief may also register entirely new parameters.
        """
        manifest = self.manifest()
        if manifest is None or not message.parameters:
            return
        saved = {
            parameter.name: (segment, parameter) for segment in manifest.segments for parameter in segment.parameters
        }
        given = {parameter.name for parameter in message.parameters}
        if given.isdisjoint(saved) and not saved.keys().isdisjoint(self._job.registry.layout.where):
            return
        for parameter in message.parameters:
            if parameter.name not in saved:
                raise LayoutError(
                    f"{who} registered {parameter.name!r}, and the checkpoint {manifest.name} has none of that name: "
                    f"it is of another model; {_REMEDY}"
                )
            known = saved[parameter.name][1]
            if (known.dtype, known.shape) != (parameter.dtype, parameter.shape):
                raise LayoutError(
                    f"{who} registered {parameter.name!r} as {parameter.describe()}, the checkpoint {manifest.name} "
                    f"has {known.describe()}: it is of another model; {_REMEDY}"
                )
        segment = saved[message.parameters[0].name][0]
        missing = [parameter.name for parameter in segment.parameters if parameter.name not in given]
        if missing:
            raise LayoutError(
                f"{who} did not register {missing[0]!r}, which the checkpoint {manifest.name} has: "
                f"it is of another model; {_REMEDY}"
            )

    def has_values_of(self, segment: Segment) -> bool:
        """Whether the checkpoint has the values of this segment. If not, they are the chief's, which is reported."""
        manifest = self.manifest()
        if manifest is None:
            return False
        names = [parameter.name for parameter in segment.parameters]
        if any(p.name in names for saved in manifest.segments for p in saved.parameters):
            return True
        self._job.event(
            f"{names[0]!r} is not in {manifest.name}, it was registered later: it starts with the script's values"
        )
        return False

    def unregistered(self) -> list[str]:
        """Under the lock: parameters of the checkpoint that are not registered yet. No later save has them."""
        known = self._job.membership.state.saves.resumed_from
        if known is None or (manifest := self.manifest()) is None:
            return []
        where = self._job.registry.layout.where
        return [p.name for segment in manifest.segments for p in segment.parameters if p.name not in where]

    def changed_rules(self, segment: Segment) -> list[tuple[int, int]]:
        """The groups whose rule is not the saved one, which is reported: their rule state starts afresh."""
        manifest = self.manifest()
        saved = {p.name: s.rule_of(p).name for s in (manifest.segments if manifest else ()) for p in s.parameters}
        found: dict[int, str] = {}
        for parameter in segment.parameters:
            rule, before = segment.rule_of(parameter).name, saved.get(parameter.name, "")
            if rule != before:
                found[parameter.group] = f"the rule was {before} in the checkpoint and is {rule} now"
        for text in sorted(set(found.values())):
            self._job.event(f"{text}: parameters are kept, the optimizer state starts from zero")
        return [(segment.index, group) for group in sorted(found)]

    # -- scripts ------------------------------------------------------------------------------------------

    def ask_resume(self, request: Request, message: AskResume) -> None:
        """Tells a worker which checkpoint its script resumes from. A worker that came later gets the newest save."""
        with self._job.lock:
            state = self._job.membership.state
            member = state.members.get(request.peer.name)
            is_late = member is not None and member.since > 1
            noted_by = self._whose_note(request.peer.name, message.others_first) if is_late else ""
            known = state.saves.newest if is_late else state.saves.resumed_from
            note = self._notes.get(noted_by)
        folder, digest = (known.folder, known.digest) if known is not None else ("", "")
        request.reply(GivenResume(folder, digest, note, noted_by))

    def script_notes(self) -> dict[str, bytes]:
        """Under the lock: the state of its script that each worker told last."""
        return {name: bytes(note.tree) for name, note in self._notes.items()}

    def note_script(self, request: Request, message: NoteScript) -> None:
        """A worker tells the state of its script. It stays in memory: workers repeat it to a new coordinator."""
        with self._job.lock:
            self._notes[request.peer.name] = message

    def _whose_note(self, name: str, others_first: bool) -> str:
        """The worker whose note a late worker gets.

        In rounds it is another worker's, which is newer, the chief's first. Otherwise it is its own of an earlier
        life, if there is one.
        """
        others = [other for other in self._job.membership.workers() if other != name and other in self._notes]
        own = [name] if name in self._notes else []
        others_first = others_first or policy_of(self._job.config).in_rounds
        return next(iter([*others, *own] if others_first else [*own, *others]), "")


def checkpoint_of(folder: Folder, manifest: Manifest, digest: str) -> Checkpoint:
    """What the state of a job remembers of a checkpoint."""
    versions = [part.version for part in manifest.slices]
    num_bytes = sum(file.num_bytes for file in checkpoints.files_of(manifest))
    return Checkpoint(
        folder.parent().url,
        folder.url,
        manifest.name,
        digest,
        manifest.step,
        max(versions, default=0),
        manifest.seconds,
        sum(versions),
        num_bytes,
    )


def describe(manifest: Manifest, now: float) -> str:
    """For example: step 480, epoch 3, saved 5 min ago by 2 servers and 2 workers."""
    words = [f"step {manifest.step}"]
    numbers = [number for epochs in manifest.leases.epochs.values() for number in epochs]
    numbers += [end for spans in manifest.leases.finished.values() for _, end in spans]
    words += [f"epoch {max(numbers) + 1}"] if numbers else []
    ago = max(0.0, now - manifest.saved_at)
    told = f"{ago:.0f} s" if ago < 120 else f"{ago / 60:.0f} min" if ago < 7200 else f"{ago / 3600:.1f} h"
    servers, workers = len({part.file for part in manifest.slices}), manifest.config.get("workers", 0)
    with contextlib.suppress(TypeError):
        words.append(f"saved {told} ago by {counted(servers, 'server')} and {counted(workers, 'worker')}")
    return ", ".join(words)


@dataclasses.dataclass
class RestoreReport:
    """Where lost slices were restored from, and what that revokes."""

    checkpoint: str = ""
    from_workers: dict[int, WorkerCopy] = dataclasses.field(default_factory=dict)
    from_disk: dict[int, SavedSlice] = dataclasses.field(default_factory=dict)
    num_revoked: int = 0
    is_known: bool = True  # a worker has a copy of each slice, and so knows what was acknowledged
    pull_codec: str = ""  # workers that pull over sockets have rounded copies

    def told(self) -> str:
        words = []
        if self.from_workers:
            names = ", ".join(sorted({name for name, _ in self.from_workers.values()}))
            count = counted(len(self.from_workers), "slice")
            exactly = f" (over sockets rounded, by --pull-codec {self.pull_codec})" if self.pull_codec else ""
            words.append(f"{count} came back from the copy of {names}{exactly}, with fresh rule state")
        if self.from_disk:
            count = counted(len(self.from_disk), "slice")
            words.append(f"{count} came back from {self.checkpoint}, which is no older, with the rule's state")
        return "; ".join(words)


class LostSlices:
    """Restores slices that no server has.

    They come from the freshest worker's copy or from a checkpoint of this job, whichever loses less.
    """

    def __init__(self, job: JobContext, calls: ServerCalls, leases: LeaseService) -> None:
        self._job, self._calls, self._leases = job, calls, leases

    def restore(self) -> None:
        """Hosts the lost slices on their new primaries and gives them values."""
        with self._job.lock:
            lost = list(self._job.membership.state.lost)
            if not lost:
                return
            replica_sets = {number: self._job.membership.state.replica_sets[number].primary for number in lost}
            segments = [
                s for s in self._job.registry.layout.segments if any(part.id in replica_sets for part in s.slices)
            ]
            ready = set(self._job.registry.ready)
        for segment in segments:
            here = [part.id for part in segment.slices if part.id in replica_sets]
            by_server: dict[str, Message] = {}
            for server in {replica_sets[number] for number in here}:
                by_server[server] = Host(segment, [number for number in here if replica_sets[number] == server])
            self._calls.ask(by_server)
        with_values = [part.id for s in segments if s.index in ready for part in s.slices if part.id in replica_sets]
        report = self._restore_values(with_values, replica_sets, segments) if with_values else RestoreReport()
        if with_values:
            # Reported before it is kept: a coordinator that dies in between reports it twice rather than never.
            least = "at least " if self._is_a_worker_gone() or not report.is_known else ""
            is_spare = parse_policy(self._job.config.policy).has_spare
            self._job.event(
                f"{report.told()}; {least}{counted(report.num_revoked, 'acknowledged update')} "
                f"{'was' if report.num_revoked == 1 else 'were'} revoked"
                + ("; open steps may be applied to some slices only" if is_spare else "")
            )
        with self._job.lock:
            state = self._job.membership.state
            state.lost = [number for number in state.lost if number not in replica_sets]
            state.num_revoked += report.num_revoked
            if 0 in with_values:
                self._leases.acks_are_lost()
            self._job.keep()

    def _is_a_worker_gone(self) -> bool:
        """Whether updates may have been acknowledged to a worker that cannot be asked any more."""
        gone = [*self._job.membership.state.left, *self._job.evicted]
        return any(name.startswith("worker-") for name in gone)

    def _restore_values(
        self,
        lost: Sequence[int],
        replica_sets: Mapping[int, str],
        segments: Sequence[Segment],
    ) -> RestoreReport:
        """Restores each slice from where less is lost. A checkpoint that cannot be read does not count."""
        copies = self._copies(lost)
        found = {number: freshest(copies, number) for number in lost}
        checkpoint, saved = self._last_save()
        report = RestoreReport(checkpoint.name if checkpoint is not None else "", is_known=None not in found.values())
        if self._job.config.pull_codec not in NONE:
            report.pull_codec = self._job.config.pull_codec
        for number, one in found.items():
            if number in saved and is_no_older(saved[number], one[1] if one else None):
                report.from_disk[number] = saved[number]
        if checkpoint is not None and report.from_disk:
            try:
                self._calls.ask(_resume_messages(checkpoint, report.from_disk, found, replica_sets))
            except StoreError as error:
                self._job.event(f"{checkpoint.folder} cannot bring back what was lost: {error}")
                report.from_disk = {}
        for number, one in found.items():
            if number not in report.from_disk:
                if one is None:
                    self._give_up(number, segments)
                report.from_workers[number] = one
        self._push_copies(report.from_workers, replica_sets)
        known = {number: one[1].known if one else 0 for number, one in found.items()}
        report.num_revoked = max(
            num_revoked(copy for _, copy in report.from_workers.values()),
            max((known[number] - part.version for number, part in report.from_disk.items()), default=0),
        )
        return report

    def _last_save(self) -> tuple[Checkpoint | None, dict[int, SavedSlice]]:
        """The newest checkpoint of this job, and its slices by id."""
        with self._job.lock:
            last = self._job.membership.state.saves.last
        if last is None:
            return None, {}
        try:
            manifest, _ = read_manifest(open_folder(last.folder), last.digest)
        except StoreError as error:
            self._job.event(f"{last.folder} cannot bring back what was lost: {error}")
            return None, {}
        return last, {part.id: part for part in manifest.slices}

    def _copies(self, lost: Sequence[int]) -> dict[Identity, list[Copy]]:
        """Asks all workers which copies they have."""
        with self._job.lock:
            members = self._job.membership.state.members
            lives = {name: (name, members[name].incarnation) for name in self._job.membership.workers()}
            workers = {name: self._job.endpoints.get(name) for name in lives}
        found: dict[Identity, list[Copy]] = {}
        calls = []
        for name, endpoint in workers.items():
            if endpoint is None:  # it reconnects or is evicted soon
                raise ConnectionLost(f"{name} is not there, and may have the freshest copy")
            calls.append((name, endpoint.call(AskCopies(list(lost)))))
        until = time.monotonic() + _ASK_SECONDS
        for name, call in calls:
            try:
                answer = call.wait(max(0.0, until - time.monotonic()))
            except (ConnectionLost, WaitTimeout):
                raise
            except SynclineError:
                continue  # it has none
            if isinstance(answer, GivenCopies):
                found[lives[name]] = answer.copies
        return found

    def _push_copies(self, chosen: Mapping[int, WorkerCopy], replica_sets: Mapping[int, str]) -> None:
        """Lets workers send their copies to the new primaries."""
        pairs: dict[tuple[str, str], list[Copy]] = {}
        for number, (name, copy) in chosen.items():
            pairs.setdefault((name, replica_sets[number]), []).append(copy)
        calls = []
        for (name, server), copies in pairs.items():
            with self._job.lock:
                endpoint = self._job.endpoints.get(name)
                target = self._job.membership.state.members.get(server)
            if endpoint is None or target is None:
                raise ConnectionLost(f"{name} or {server} is not there")
            calls.append(endpoint.call(GiveCopies(copies, target)))
        for call in calls:
            call.wait(self._job.config.wait_seconds)

    def _give_up(self, number: int, segments: Iterable[Segment]) -> NoReturn:
        """Fails the job: there is no copy of this slice."""
        names = [
            segment.parameters[piece.parameter].name
            for segment in segments
            for part in segment.slices
            if part.id == number
            for piece in segment.pieces(part)
        ]
        shown = ", ".join(repr(name) for name in names[:3])
        reason = f"no server and no worker has a copy of {shown}; with --replicas 2 a server's death costs nothing"
        if self._job.config.is_ring:
            reason = (
                f"every process that had {shown} has ended: why is said above; with --checkpoint DIR the same "
                "command goes on from the last save"
            )
        with self._job.lock:
            self._job.membership.fail("server", reason)
        self._job.conclude()
        raise ConnectionLost(reason)


def _resume_messages(
    checkpoint: Checkpoint,
    parts: Collection[int],
    found: Mapping[int, WorkerCopy | None],
    replica_sets: Mapping[int, str],
) -> dict[str, Message]:
    """What each server is told to read from the checkpoint."""
    mine: dict[str, list[int]] = {}
    for number in parts:
        mine.setdefault(replica_sets[number], []).append(number)
    known = {number: one[1].known if one else 0 for number, one in found.items()}
    return {
        name: Resume(checkpoint.folder, checkpoint.digest, numbers, True, known=[known[n] for n in numbers])
        for name, numbers in mine.items()
    }
