"""What a coordinator's twin does about barriers."""

from __future__ import annotations

from syncline.core.wire.control import Passed

from .saving import Saving
from .world import Frame, Session


class AtBarriers(Saving):
    """Who has come, and who may go on."""

    def on_barrier(self, session: Session, frame: Frame) -> None:
        turn, phase = frame.body
        if not self._is_member(frame):
            return
        if not self.barriers.arrive("epoch", turn, frame.name, phase):
            self.say(frame.name, "passed", (turn, self.barriers.behind_passed(phase, self.state.phase)))
            return
        self.at_barrier[frame.name] = (turn, session)
        self._release_barriers()

    def _release_barriers(self) -> None:
        if self.world.now < self.world.disk.full_until:  # nobody is told of what could not be kept
            self.after(0.05, self._release_barriers)
            return
        whole = self.barriers.ready([*self.state.entered, *self.state.fencing] or self.membership.workers())
        phases = self.barriers.pass_all(whole)
        self.barriers.forget(whole)
        for (_, turn), self.state.phase in zip(whole, phases, strict=True):
            self.keep()
            for name, (known, _) in list(self.at_barrier.items()):
                if known == turn:
                    del self.at_barrier[name]
                    self.say(name, "passed", (turn, Passed(self.state.phase)))
