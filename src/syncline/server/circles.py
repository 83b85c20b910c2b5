"""How a server makes the circles of its ring, one for each generation: with whom, where, and by what it hears."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Sequence

from syncline.config import JobConfig
from syncline.core.members import Member
from syncline.core.ring import check_circle_hosts, partner_of
from syncline.core.wire.message import Done
from syncline.core.wire.traffic import Introduce
from syncline.errors import SynclineError
from syncline.net.rpc import Request
from syncline.server.circle import GROUPS, LIMITS, Circle, Formed
from syncline.server.hosting import Hosting
from syncline.server.introductions import Heard, Introductions
from syncline.server.saying import Saying
from syncline.server.summing import Failed, Summed
from syncline.server.sums import Sums

_LOOPBACK = "127.0.0.1"


class Circles:
    """Of one server."""

    def __init__(self, config: JobConfig, hosting: Hosting) -> None:
        self._config, self._hosting = config, hosting
        self.heard = Heard()

    @property
    def what(self) -> str:
        return self._config.sums

    def begin(self, generation: int, names: Sequence[str], summed: Summed, failed: Failed) -> Circle | None:
        """All servers make the same circle, when a round is whole."""
        self.heard.begin(generation)
        if len(names) < 2:
            return None
        return Circle(
            names, functools.partial(self._form, generation, names),
            Sums(self._hosting.copies), self._hosting.home, partner_of(self._hosting.name),
            is_whole=self._hosting.has_all, summed=summed, failed=failed,
        )  # fmt: skip

    def _form(self, generation: int, names: Sequence[str]) -> Formed:
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
        made = GROUPS[self._config.sums](store, rank, len(names), seconds, address)
        return Formed(made, store, LIMITS[self._config.sums])

    def _address(self, members: Collection[Member]) -> str:
        """On one host nobody outside of it can connect."""
        if len({member.host for member in members}) == 1:
            return _LOOPBACK
        mine = next(member for member in members if member.name == self._hosting.name)
        return mine.address.host if mine.address is not None else _LOOPBACK

    def hear(self, request: Request, message: Introduce) -> None:
        self.heard.hear(message.generation, message.key, message.value)
        request.reply(Done())

    def close(self) -> None:
        """Whoever waits for introductions does not any more."""
        self.heard.begin(1 << 62)
