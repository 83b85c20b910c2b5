"""A server's part in the sums of its ring, where torch.distributed makes them: every server holds all of them itself.

A round that is whole here waits for its circle; then it is held, voted on and applied as every round of a ring.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection

from syncline.config import JobConfig
from syncline.core.members import Member
from syncline.core.message import Done
from syncline.core.ring import check_circle_hosts, partner_of
from syncline.core.standings import by_name
from syncline.core.traffic import Introduce, Replicate
from syncline.errors import SynclineError
from syncline.net.rpc import Request
from syncline.roles.server.backups import Backups
from syncline.roles.server.circle import GROUPS, Circle, Formed
from syncline.roles.server.flow import Flow
from syncline.roles.server.hosted import HostedSlice
from syncline.roles.server.hosting import Hosting
from syncline.roles.server.introductions import Heard, Introductions
from syncline.roles.server.saying import Saying
from syncline.roles.server.sums import RoundSums, Sums
from syncline.roles.server.voting import Voting
from syncline.roles.server.work import RoundWork, late_of, uses_of

_LOOPBACK = "127.0.0.1"
#: For a circle that is over to be out of torch, at the end of a server.
CLOSE_SECONDS = 5.0


class Summing:
    """The circle of the current generation, and what has come of it while a change is on its way."""

    def __init__(self, config: JobConfig, flow: Flow, voting: Voting, hosting: Hosting) -> None:
        self._config, self._flow, self._voting, self._hosting = config, flow, voting, hosting
        self._order: threading.RLock = flow.order
        self.heard = Heard()
        self._circle: Circle | None = None
        self._ended: list[Circle] = []
        # Summed while a change was on its way, and what was to come next.
        self._unheld: list[tuple[RoundWork, Callable[[RoundWork], None]]] = []

    # -- circles ------------------------------------------------------------------------------------------

    def begin(self, generation: int, names: Collection[str]) -> None:
        """Under `order`: seats have changed. All servers make the same circle, when a round is whole."""
        self._end()
        self._unheld.clear()
        self.heard.begin(generation)
        if len(names) < 2:
            return
        ordered = sorted(names, key=by_name)
        sums = Sums(self._slots, partner_of(self._hosting.name))
        self._circle = Circle(
            ordered, functools.partial(self._form, generation, ordered), sums, self._hosting.home,
            timeout_seconds=self._config.wait_seconds, is_whole=self._hosting.has_all,
            summed=self._summed, failed=self._failed,
        )  # fmt: skip

    def supplied(self) -> None:
        circle = self._circle
        if circle is not None:
            circle.supplied()

    def _slots(self) -> list[HostedSlice]:
        return [*self._hosting.slices.values(), *self._hosting.backups.slots()]

    def _form(self, generation: int, names: list[str]) -> Formed:
        members = self._hosting.members_named(names)
        check_circle_hosts(self._config, [member.host for member in members])
        others = self._hosting.partners_named(names)
        for partner in others:
            with contextlib.suppress(SynclineError, OSError):  # what is said to it is said again
                partner.connect()

        def tell(key: str, value: bytes) -> None:
            for partner in others:
                Saying(partner, Introduce(generation, key, value)).send()

        seconds = self._config.wait_seconds
        store = Introductions(generation, self.heard, tell, seconds)
        rank, address = names.index(self._hosting.name), self._address(members)
        return Formed(GROUPS[self._config.sums](store, rank, len(names), seconds, address), store)

    def _address(self, members: Collection[Member]) -> str:
        """On one host nobody outside of it can connect."""
        if len({member.host for member in members}) == 1:
            return _LOOPBACK
        mine = next(member for member in members if member.name == self._hosting.name)
        return mine.address.host if mine.address is not None else _LOOPBACK

    def hear(self, request: Request, message: Introduce) -> None:
        self.heard.hear(message.generation, message.key, message.value)
        request.reply(Done())

    def _end(self) -> None:
        """The circle is over; it is kept until it is out of torch."""
        circle, self._circle = self._circle, None
        if circle is not None:
            circle.close()
            self._ended = [*(old for old in self._ended if old.is_alive), circle]

    def close(self) -> None:
        """Also the introductions end: whoever waits for some does not any more."""
        with self._order:
            self._end()
            ended, self._ended = self._ended, []
        self.heard.begin(1 << 62)
        for circle in ended:
            circle.join(CLOSE_SECONDS)

    # -- rounds -------------------------------------------------------------------------------------------

    def submit(self, work: RoundWork) -> None:
        """A round is whole here. Until it has its sums it is on no way: others may not even have heard of it."""
        with self._order:
            if not self._voting.expects(work):
                return
            self._flow.waits(work)
            circle = self._circle
        assert circle is not None
        circle.submit(work)

    def _summed(self, work: RoundWork, sums: RoundSums) -> None:
        with self._order:
            if not self._voting.expects(work):
                return  # dropped
            work.sums = sums
            if self._voting.is_frozen:
                self._unheld.append((work, self._flow.summed))
                return
            self._flow.resumes(work)
        self._flow.summed(work)

    def _failed(self, work: RoundWork, error: Exception) -> None:
        with self._order:
            if not self._voting.expects(work):
                return
        names = ", ".join(self._circle.names) if self._circle is not None else "the circle"
        text = f"{self._config.sums} could not add up gradients among {names}: {type(error).__name__}: {error}"
        self._flow.fail(work, SynclineError(text))

    def thaw(self) -> None:
        """The change is not to be."""
        with self._order:
            unheld, self._unheld = self._unheld, []
            unheld = [(work, go_on) for work, go_on in unheld if self._voting.expects(work)]
            for work, _ in unheld:
                self._flow.resumes(work)
        for work, go_on in unheld:
            go_on(work)

    def hold(self, work: RoundWork) -> bool:
        """All sums of other servers' slices are here too: they are held, and then the slices here get theirs, never
        before: this server's vote says that it holds all. False while a change is on its way: it waits for that."""
        with self._order:
            if not self._voting.expects(work):
                return False
            if self._voting.is_frozen:
                self._flow.waits(work)
                self._unheld.append((work, self._flow.go_through))
                return False
            hold_sums(self._hosting.backups, work)
            for slot in work.slots:
                slot.queue.append(work)
            return True


def hold_sums(backups: Backups, work: RoundWork) -> None:
    """As if every primary had said: the same round, with the same numbers."""
    sums = work.sums
    assert sums is not None and work.ballot is not None
    for number, backup in list(backups.backups.items()):
        slot = backup.slot
        if slot is None:
            continue
        with slot.lock:
            commits, scale = slot.admitted(work)
            has = sums.has(slot) if commits and not work.is_beyond(slot.state.version) else []
            is_first = number == 0
            message = Replicate(
                number,
                slot.state.version,
                [(c.worker, c.item.incarnation, c.clock) for c in commits],
                list(work.fences),
                has,
                list(work.overrides_for(slot.part.segment).items()),
                scale,
                False,
                uses_of(commits) if is_first else [],
                late_of(commits) if is_first else [],
                work.roll,
                work.ballot,
            )
        backup.held = (message, sums.region(slot) if has else None)
