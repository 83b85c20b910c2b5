"""First values of slices: the chief's, or a worker's copy of what was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from syncline.core.wire.message import Done
from syncline.core.wire.traffic import Restore, Upload
from syncline.errors import ProtocolError, SynclineError
from syncline.net.rpc import Request
from syncline.net.transport import Buffer, Peer, buffer_of
from syncline.server.commits import Commits
from syncline.server.hosted import HostedSlice
from syncline.server.hosting import Hosting


class Values:
    """What slices begin with."""

    def __init__(self, hosting: Hosting, drain: Callable[[HostedSlice], None]) -> None:
        self._hosting, self._drain = hosting, drain

    def landing(self, peer: Peer, message: Upload | Restore, commits: Commits) -> Sequence[Buffer]:
        """What cannot be taken is read all the same, and refused after that: the connection lives on."""
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
        """They are where they belong; the same again, before anything was applied, changes nothing."""
        for slot in [self._to_be_uploaded(request.peer, message, n, commits) for n in message.slices]:
            with slot.lock:
                slot.rules.uploaded()
                slot.uploaded = True
                slot.renew_backups()
            self._drain(slot)
        request.reply(Done())

    def restore(self, request: Request, message: Restore, commits: Commits) -> None:
        (values,) = request.payload or (memoryview(b""),)
        with commits.order:
            self._hosting.restore(message.copy, values, list(commits.rounds.standings.values()))
        request.reply(Done())
