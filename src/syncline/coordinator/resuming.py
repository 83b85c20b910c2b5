"""Taking up a checkpoint: which one, before the job forms; and whether what is registered is what was saved."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import TYPE_CHECKING

from syncline.config import JobConfig
from syncline.coordinator.recording import checkpoint_of
from syncline.core.checkpoint.manifest import Manifest
from syncline.core.checkpoint.snapshot import taken_up
from syncline.core.layout import Segment
from syncline.core.leasing.leases import LeaseState
from syncline.core.policy import policy_of
from syncline.core.units import counted
from syncline.core.wire.checkpoints import AskResume, GivenResume, NoteScript
from syncline.core.wire.control import Register
from syncline.errors import DamagedError, LayoutError, SynclineError
from syncline.net.rpc import Request
from syncline.store import checkpoints
from syncline.store.folders import open_folder
from syncline.store.trouble import MissingError

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator

_REMEDY = "start over beside it with --fresh, or say another --checkpoint"


class Resuming:
    """The checkpoint that a job goes on from, if any."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator
        self._looked_for: tuple[str, str, bool] | None = None  # for what the choice was made, or is being made
        self._is_looking = False
        self._chosen: checkpoints.Chosen | None = None
        self._leases = LeaseState()  # of what was chosen
        self._manifest: Manifest | None = None
        self._notes: dict[str, NoteScript] = {}  # by worker: the last one
        self._is_gone = False

    # -- before the job forms -----------------------------------------------------------------------------

    def is_ready(self, config: JobConfig) -> bool:
        """Under the lock: whether it is known what to take up by these settings; else that is looked for."""
        wanted = (config.checkpoint, config.resume, config.fresh)
        if self._is_looking:
            return False
        if self._looked_for == wanted or not (config.resume or (config.checkpoint and not config.fresh)):
            return True
        self._looked_for, self._is_looking, self._chosen = wanted, True, None
        threading.Thread(target=self._look, args=(config,), name="resume", daemon=True).start()
        return False

    def _look(self, config: JobConfig) -> None:
        """All of a checkpoint is read before it is believed: that may take a while."""
        found, leases, failure = None, LeaseState(), ""
        try:
            found = checkpoints.choose(open_folder(config.resume or config.checkpoint), self._c.event)
            if found is None and config.resume:
                failure = f"--resume {config.resume}: there is no checkpoint to take up"
            leases = taken_up(found.manifest.leases) if found is not None else leases
        except SynclineError as error:
            failure = str(error)
        except Exception as error:  # a bug of ours must end in a verdict, not in silence
            failure = f"it has a bug: {type(error).__name__}: {error}"
        with self._c.lock:
            self._chosen, self._leases, self._is_looking = found, leases, False
            if failure:
                self._c.membership.fail("coordinator", failure)
            else:
                self._form()
        self._c.ending.conclude()

    def _form(self) -> None:
        """Under the lock: the job begins, or ends with the reason; this thread is in nobody else's hands."""
        try:
            self._c.joining.form_if_ready(False)
        except SynclineError as error:
            self._c.membership.fail("coordinator", str(error))
        except Exception as error:
            self._c.membership.fail("coordinator", f"it has a bug: {type(error).__name__}: {error}")

    def form(self) -> None:
        """Under the lock, when the job forms: it goes on from what was chosen, or begins."""
        state, config = self._c.membership.state, self._c.config
        state.saves.lineage, state.saves.token = secrets.token_hex(8), secrets.token_hex(8)
        found = self._chosen
        if found is None:
            return
        manifest = self._manifest = found.manifest
        state.saves.taken_up = checkpoint_of(found.folder, manifest, found.digest)
        state.saves.lineage, state.saves.seconds = manifest.lineage, manifest.seconds
        state.leases = self._leases
        state.validations.floor = manifest.step
        self._c.stopping.take_up(manifest.steering, manifest.seconds)
        self._c.event(f"takes up {found.folder.url}: {describe(manifest, time.time())}")
        if config.policy != manifest.config.get("policy", config.policy):
            self._c.event(f"its policy was {manifest.config['policy']}, and is {config.policy} now")

    # -- when parameters are registered -------------------------------------------------------------------

    def manifest(self) -> Manifest | None:
        """Of what was taken up; read again by a coordinator that came later. None also when it is no more needed."""
        known = self._c.membership.state.saves.taken_up
        if known is not None and self._manifest is None and not self._is_gone:
            try:
                self._manifest, _ = checkpoints.read_manifest(open_folder(known.folder), known.digest)
            except (MissingError, DamagedError) as error:
                if not self._c.registry.layout.segments:
                    raise
                self._is_gone = True  # retention has removed it, which it does when all of it is registered
                self._c.event(f"what is registered from now on starts with its own values: {error}")
        return self._manifest

    def check(self, who: str, message: Register) -> None:
        """What the chief registers must be what was saved; a LayoutError says what is not.

        Later in a job, when something of the checkpoint is there, it may also be all new.
        """
        manifest = self.manifest()
        if manifest is None or not message.parameters:
            return
        saved = {
            parameter.name: (segment, parameter) for segment in manifest.segments for parameter in segment.parameters
        }
        given = {parameter.name for parameter in message.parameters}
        if given.isdisjoint(saved) and not saved.keys().isdisjoint(self._c.registry.layout.where):
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

    def has(self, segment: Segment) -> bool:
        """Whether its values are in what was taken up. Those of one that came later are the chief's; that is said."""
        manifest = self.manifest()
        if manifest is None:
            return False
        names = [parameter.name for parameter in segment.parameters]
        if any(p.name in names for saved in manifest.segments for p in saved.parameters):
            return True
        self._c.event(
            f"{names[0]!r} was registered later than {manifest.name} was saved: it starts with its own values"
        )
        return False

    def lacking(self) -> list[str]:
        """Under the lock: parameters of what was taken up that nobody has registered yet. No other save has them."""
        known = self._c.membership.state.saves.taken_up
        if known is None or (manifest := self.manifest()) is None:
            return []
        where = self._c.registry.layout.where
        return [p.name for segment in manifest.segments for p in segment.parameters if p.name not in where]

    def fresh(self, segment: Segment) -> list[tuple[int, int]]:
        """Groups whose rule is another than was saved: their state starts afresh, which is said."""
        manifest = self.manifest()
        saved = {p.name: s.rule_of(p).name for s in (manifest.segments if manifest else ()) for p in s.parameters}
        found: dict[int, str] = {}
        for parameter in segment.parameters:
            rule, before = segment.rule_of(parameter).name, saved.get(parameter.name, "")
            if rule != before:
                found[parameter.group] = f"the rule was {before} in the checkpoint and is {rule} now"
        for text in sorted(set(found.values())):
            self._c.event(f"{text}: parameters are taken up, the state of the rule starts afresh")
        return [(segment.index, group) for group in sorted(found)]

    # -- scripts ------------------------------------------------------------------------------------------

    def asked(self, request: Request, message: AskResume) -> None:
        """Who came later has the state of the newest save: the others have gone on since the job was taken up."""
        with self._c.lock:
            state = self._c.membership.state
            member = state.members.get(request.peer.name)
            is_late = member is not None and member.since > 1
            noted_by = self._whose_note(request.peer.name, message.others_first) if is_late else ""
            known = state.saves.newest if is_late else state.saves.taken_up
            note = self._notes.get(noted_by)
        folder, digest = (known.folder, known.digest) if known is not None else ("", "")
        request.reply(GivenResume(folder, digest, note, noted_by))

    def note(self, request: Request, message: NoteScript) -> None:
        """A worker's script is there now. Kept in memory only: a coordinator that comes back hears of it again."""
        with self._c.lock:
            self._notes[request.peer.name] = message

    def _whose_note(self, name: str, others_first: bool) -> str:
        """Where workers step together, that of one that lives, the chief first: it has gone on meanwhile. Otherwise
        its own, of an earlier life, where there is one."""
        others = [other for other in self._c.membership.workers() if other != name and other in self._notes]
        own = [name] if name in self._notes else []
        others_first = others_first or policy_of(self._c.config).in_rounds
        return next(iter([*others, *own] if others_first else [*own, *others]), "")


def describe(manifest: Manifest, now: float) -> str:
    """step 480, epoch 3, saved 5 min ago by 2 servers and 2 workers."""
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
