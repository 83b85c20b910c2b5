"""Initial values of slices: from the chief, from a worker's copy of a lost slice, or from a checkpoint."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Sequence

import numpy as np

from syncline.core.checkpoint.manifest import Manifest, SavedTensor
from syncline.core.checkpoint.restoring import Overlap, Restoring, clocks_of, version_of
from syncline.core.layout import ITEM_BYTES
from syncline.core.slice_state import life_of
from syncline.core.wire.checkpoints import Resume
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import Restore, StateEntry, Upload
from syncline.errors import ProtocolError, StoreError, SynclineError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer, buffer_of
from syncline.server.commits import Commits
from syncline.server.hosting import Hosting
from syncline.server.numbers import numbers_in
from syncline.server.slices import Bytes, HostedSlice
from syncline.server.tasks import in_thread
from syncline.store.checkpoints import read_manifest
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorReader, in_threads


class Values:
    """Receives initial values."""

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting

    def buffers_for(self, peer: Peer, message: Upload | Restore, commits: Commits) -> Sequence[Buffer]:
        """Receive buffers for values. Values that cannot be used are read, then refused, so that the connection
        survives.
        """
        if isinstance(message, Restore):
            return [self._nowhere(message.copy.slice)]
        found = []
        for number in message.slices:
            try:
                found.append(buffer_of(self._to_be_uploaded(peer, message, number, commits).memory))
            except SynclineError:
                found.append(self._nowhere(number))
        return found

    def _nowhere(self, number: int) -> Buffer:
        return buffer_of(np.empty(self._hosting.find(number)[1].num_bytes, np.uint8))

    def _to_be_uploaded(self, peer: Peer, message: Upload, number: int, commits: Commits) -> HostedSlice:
        commits.ranks.check_chief(peer, "uploads values")
        slot = self._hosting.primary(number)
        if slot.part.segment != message.segment:
            raise ProtocolError(f"{self._hosting.name} does not host slice {number} of segment {message.segment}")
        may = message.again and commits.ranks.num_workers == 1
        if slot.uploaded and (slot.state.version or slot.copied is not None) and not may:
            raise ProtocolError(f"{peer} uploads values that the job has already")
        return slot

    def uploaded(self, request: Request, message: Upload, commits: Commits) -> None:
        """Activates uploaded values. A repetition before the first update changes nothing."""
        for slot in [self._to_be_uploaded(request.peer, message, n, commits) for n in message.slices]:
            with slot.lock:
                slot.rules.uploaded()
                slot.uploaded = True
                slot.renew_backups()
            slot.drain()
        request.reply(Done())

    def restore(self, request: Request, message: Restore, commits: Commits) -> None:
        (values,) = request.payload or (memoryview(b""),)
        with commits.state_lock:
            self._hosting.restore(message.copy, values, list(commits.rounds.standings.values()))
        request.reply(Done())


#: A byte range of a saved tensor and its destination.
Wanted = tuple[int, int, Buffer]


class Taking:
    """One current slice, assembled from saved ones."""

    def __init__(self, slot: HostedSlice, overlaps: Sequence[Overlap]) -> None:
        self.slot, self.overlaps = slot, overlaps
        self._states: dict[tuple[int, str], tuple[StateEntry, Bytes]] = {}

    def values(self) -> list[tuple[tuple[str, str], Wanted]]:
        """The byte ranges of saved tensors that make up its parameters."""
        memory, found = buffer_of(self.slot.memory), []
        for overlap in self.overlaps:
            begin, end = overlap.in_new()
            found.append(((overlap.saved.file, overlap.saved.tensor), (*overlap.in_old(), memory[begin:end])))
        return found

    def states(
        self, tensors: dict[tuple[str, str], SavedTensor], fresh: Sequence[tuple[int, int]]
    ) -> list[tuple[tuple[str, str], Wanted]]:
        """The byte ranges for its rule state. Elementwise state is split and joined like the parameters."""
        segment, found = self.slot.segment, []
        for overlap in self.overlaps:
            parameter = segment.parameters[overlap.new.parameter]
            if (segment.index, parameter.group) in fresh:
                continue
            elementwise = segment.rule_of(parameter).elementwise
            for state in overlap.states():
                tensor = tensors[overlap.saved.file, state.tensor]
                if elementwise and tensor.shape == (overlap.old.num_items,):
                    wanted = self._part(overlap, state.key, tensor)
                else:
                    wanted = self._whole(overlap, state.key, tensor)
                found += [((overlap.saved.file, state.tensor), each) for each in wanted]
        return found

    def _part(self, overlap: Overlap, key: str, tensor: SavedTensor) -> list[Wanted]:
        size, new, old = ITEM_BYTES[tensor.dtype], overlap.new, overlap.old
        array = self._array(overlap.new_index, key, tensor.dtype, (new.num_items,))
        begin, there = (overlap.start - new.start) * size, (overlap.start - old.start) * size
        num_bytes = overlap.num_items * size
        return [(there, there + num_bytes, buffer_of(array[begin : begin + num_bytes]))]

    def _whole(self, overlap: Overlap, key: str, tensor: SavedTensor) -> list[Wanted]:
        """State of a whole piece: a scalar from the first part, or the state of a rule that needs whole tensors."""
        if (overlap.new_index, key) in self._states:
            return []
        old, new = overlap.old, overlap.new
        is_number = tensor.end - tensor.begin == ITEM_BYTES[tensor.dtype]
        if not is_number and (old.start, old.num_items) != (new.start, new.num_items):
            raise StoreError(f"state {key!r} of a whole parameter is cut in the checkpoint, and cannot be joined")
        array = self._array(overlap.new_index, key, tensor.dtype, tensor.shape)
        return [(0, array.nbytes, buffer_of(array))]

    def _array(self, piece: int, key: str, dtype: str, shape: tuple[int, ...]) -> Bytes:
        if (piece, key) not in self._states:
            entry = StateEntry(self.slot.part.id, piece, key, dtype, shape)
            self._states[piece, key] = (entry, np.zeros(entry.num_bytes, np.uint8))
        entry, array = self._states[piece, key]
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise StoreError(f"state {key!r} is {dtype}{list(shape)} in one slice, {entry.dtype} in another")
        return array

    def load(self) -> None:
        """Loads the assembled data into the rules."""
        states, self._states = self._states, {}
        with self.slot.lock, self.slot.storage.at_work():
            rules = self.slot.rules
            rules.uploaded()
            rules.load_state([(e, numbers_in(array, e.dtype).reshape(e.shape)) for e, array in states.values()])


class Loading:
    """Loads checkpoints, one at a time."""

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting
        self._one_at_a_time = threading.Lock()
        self._taken: dict[int, tuple[HostedSlice, str]] = {}  # slice -> the digest it was loaded from

    def resume(self, request: Request, message: Resume, commits: Commits) -> None:
        def action() -> None:
            with self._one_at_a_time:
                self._resume(message, commits)
            request.reply(Done())

        in_thread("take up", request, action)

    def _resume(self, message: Resume, commits: Commits) -> None:
        folder = open_folder(message.folder)
        manifest, _ = read_manifest(folder, message.digest)
        restoring = Restoring(manifest)
        slots = [self._hosting.primary(number) for number in message.slices]
        takings = [
            Taking(slot, restoring.overlaps(slot.segment, slot.part))
            for slot in slots
            if not self._has(slot, message.digest)
        ]
        for taking in takings:
            if taking.slot.uploaded:
                raise StoreError(f"slice {taking.slot.part.id} has its values already: it takes up nothing")
        self._read(message, manifest, takings)
        known = dict(zip(message.slices, message.known, strict=False))
        for taking in takings:
            taking.load()
            self._begin(taking, message, known.get(taking.slot.part.id, 0), commits)

    def _has(self, slot: HostedSlice, digest: str) -> bool:
        """Whether the slice was loaded from this digest already."""
        known = self._taken.get(slot.part.id)
        return known is not None and known[0] is slot and known[1] == digest

    def _read(self, message: Resume, manifest: Manifest, takings: Sequence[Taking]) -> None:
        """Reads every needed tensor once. Data with a wrong digest is not used."""
        tensors = {(file.name, tensor.name): tensor for file in manifest.files for tensor in file.tensors}
        wanted: dict[tuple[str, str], list[Wanted]] = collections.defaultdict(list)
        for taking in takings:
            for key, one in (*taking.values(), *taking.states(tensors, message.fresh)):
                wanted[key].append(one)
        folder = open_folder(message.folder)
        readers = {file.name: TensorReader(folder, file) for file in manifest.files}

        def read(key: tuple[str, str]) -> None:
            tensor, places = tensors[key], sorted(wanted[key], key=_begin)
            if _is_apart(places):
                readers[key[0]].read_into(key[1], _views(places, tensor.end - tensor.begin))
                return
            found = buffer_of(readers[key[0]].read(key[1]))
            for begin, end, view in places:
                view[:] = found[begin:end]

        try:
            # In file order.
            in_threads(read, sorted(wanted, key=lambda key: (key[0], tensors[key].begin)))
        finally:
            for reader in readers.values():
                reader.close()

    def _begin(self, taking: Taking, message: Resume, known: int, commits: Commits) -> None:
        slot = taking.slot
        with commits.state_lock:
            standings = commits.rounds.standings.values()
            lives = {(s.name, s.incarnation) for s in standings}
            with slot.lock:
                slot.state.version = max(known, version_of(taking.overlaps))
                if message.clocks:
                    clocks = clocks_of(taking.overlaps)
                    slot.state.clocks = {life: clock for life, clock in clocks.items() if life in lives}
                    slot.copied = {life_of(*life): clock for life, clock in clocks.items()}
                slot.uploaded = True
                slot.renew_backups()
        self._taken[slot.part.id] = (slot, message.digest)
        slot.drain()


def _begin(wanted: Wanted) -> int:
    return wanted[0]


def _is_apart(wanted: Sequence[Wanted]) -> bool:
    """Whether every byte has one destination. A scalar of a whole piece goes to all slices of that piece."""
    return all(one[1] <= two[0] for one, two in itertools.pairwise(wanted))


def _views(wanted: Sequence[Wanted], num_bytes: int) -> list[memoryview]:
    """Buffers for all bytes of a tensor: the destinations, and a scratch buffer for bytes that are not needed."""
    found, at = [], 0
    for begin, end, view in wanted:
        found += [*_nowhere(begin - at), view]
        at = end
    return [*found, *_nowhere(num_bytes - at)]


def _nowhere(num_bytes: int) -> list[memoryview]:
    return [buffer_of(np.empty(num_bytes, np.uint8))] if num_bytes else []
