"""Saves that are to be, and the one that has begun: who asked, and for whom is waited."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from syncline.config import JobConfig
from syncline.core.wire.checkpoints import Expect
from syncline.errors import ConnectionLost
from syncline.net.rpc import Call, Endpoint, Request
from syncline.stats import Wait

#: For workers other than the chief to come to a boundary; a save without a slow one's script is still a save.
EXPECT_SECONDS = 10.0
#: The same where all workers wait for the cut: who is not at a boundary by now does not come to one.
VALIDATED_SECONDS = 2.0
#: In rounds others may wait for the step of who has asked: then it goes on without its answer.
ASKER_SECONDS = 1.0


@dataclasses.dataclass
class Wanted:
    """A save that is to be."""

    reason: str
    requests: list[Request]
    since: float = 0.0
    not_before: float = 0.0
    num_tries: int = 0
    is_final: bool = False
    hurries: bool = False
    turn: int = 0  # the validation for which all workers stand still until the cut is made
    on_cut: Callable[[], None] = lambda: None  # or is not to be had

    def join(self, later: Wanted) -> None:
        """What was asked for meanwhile is this one."""
        self.requests += later.requests
        self.is_final |= later.is_final
        self.hurries |= later.hurries
        if later.turn:
            self.turn, self.on_cut = later.turn, later.on_cut

    def has_askers(self, waiting: Collection[str], seconds: float) -> bool:
        """Whether anybody has waited for so long while others are waited for, who may wait for its step."""
        return seconds >= ASKER_SECONDS and any(_is_asker(request, waiting) for request in self.requests)

    def let_go(self, waiting: Collection[str]) -> list[Request]:
        """These are answered now."""
        found = [request for request in self.requests if _is_asker(request, waiting)]
        self.requests = [request for request in self.requests if request not in found]
        return found


@dataclasses.dataclass
class UnderWay:
    """One that has begun: until its cut begins, whoever asks for a save has this one."""

    number: int
    wanted: Wanted
    began: float
    chief: str
    expects: dict[str, Call] = dataclasses.field(default_factory=dict)
    is_cut: bool = False
    cut_at: float = 0.0
    is_marked: bool = False  # the cut is made: who stood still for it goes on

    def expect(self, endpoints: Mapping[str, Endpoint], wake: Callable[[], None]) -> None:
        """Asks workers to come to a boundary. `wake`: at each answer."""
        expects: dict[str, Call] = {}
        for name, endpoint in endpoints.items():
            with contextlib.suppress(ConnectionLost):
                expects[name] = endpoint.call(Expect(self.number))
        self.expects = expects  # whole, since others look at it meanwhile
        for call in expects.values():
            call.when_done(wake)

    @property
    def waiting(self) -> list[str]:
        """Workers that have come to no boundary yet."""
        return [name for name, call in self.expects.items() if not call.is_done]

    def next_look(self, now: float) -> float:
        """When something else may be so, though nobody has said anything."""
        times = [self.began + seconds for seconds in (ASKER_SECONDS, VALIDATED_SECONDS, EXPECT_SECONDS)]
        return min((at for at in times if at > now), default=math.inf)

    def is_expected(self, now: float, config: JobConfig) -> bool:
        """The chief is at a boundary, and whoever came to one soon. Who is gone is waited for no more."""
        patience = min(config.wait_seconds, config.save_seconds / 2) if self.wanted.hurries else config.wait_seconds
        if self.wanted.turn:
            patience = min(patience, VALIDATED_SECONDS)
        waiting, passed = self.waiting, now - self.began
        is_late = passed >= min(EXPECT_SECONDS, patience)
        return not waiting or (is_late and self.chief not in waiting) or passed >= patience


def _is_asker(request: Request, waiting: Collection[str]) -> bool:
    return request.peer.role == "worker" and any(name != request.peer.name for name in waiting)


def finishing_waits(finishing: Mapping[str, float], workers: Sequence[str]) -> list[Wait]:
    """Whose scripts have ended, and for so long, before the last save, for those who go on."""
    others = [name for name in workers if name not in finishing]
    return [Wait(name, 0, others, seconds, "the last save") for name, seconds in finishing.items() if others]
