"""What servers and workers have in common: they join, beat, and hear of generations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncline.core.members import Member

from .world import Frame, Process, Session

if TYPE_CHECKING:
    from .job import Job

BEAT_SECONDS = 0.25


class SimMember(Process):
    """A process that is a member, or wants to be one."""

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(job.world, name)
        self.job = job
        self.incarnation, self.generation, self.term = 0, 0, 0
        self.members: dict[str, Member] = {}
        self.asks: dict[str, Any] = {"join": (self.role, name, self.life)}  # said with every beat until answered

    def begin(self) -> None:
        self._beat()

    def _beat(self) -> None:
        self.ask()
        self.after(BEAT_SECONDS, self._beat)

    def ask(self) -> None:
        """What one wants of the coordinator, again."""
        life = self.world.current["coordinator"].life
        if self.incarnation:
            self.send(life, self.frame("beat", self.beat()))
        for kind, body in list(self.asks.items()):
            if not self.is_said(life, kind, body):
                self.send(life, self.frame(kind, body))

    def beat(self) -> Any:
        """What goes with a beat."""
        return ()

    def is_said(self, life: str, kind: str, body: Any) -> bool:
        """Whether this is on its way, and need not be said again."""
        return False

    def frame(self, kind: str, body: Any, generation: int | None = None) -> Frame:
        number = self.generation if generation is None else generation
        return Frame(kind, self.name, self.incarnation, number, self.term, body)

    def reply(self, session: Session, kind: str, body: Any) -> None:
        self.answer(session, self.frame(kind, body))

    def heed(self, session: Session, frame: Frame) -> bool:
        """Whether this is the word of the latest coordinator."""
        if frame.term < self.term and "accept_old_term" not in self.job.bugs:
            self.reply(session, "old_term", ())
            return False
        self.term = max(self.term, frame.term)
        return True

    def on_joined(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame) and not self.incarnation and frame.body["process"] == self.life:
            self.incarnation = frame.body["incarnation"]
            del self.asks["join"]
            self.joined(frame.body["late"])

    def joined(self, late: bool) -> None: ...

    def on_out(self, session: Session, frame: Frame) -> None:
        """This process has been evicted: it says so, and ends."""
        if self.heed(session, frame) and frame.body == (self.incarnation,) and self.incarnation:
            self.end()

    def on_roster(self, session: Session, frame: Frame) -> None:
        if self.heed(session, frame):
            self.take_roster(*frame.body)

    def take_roster(self, generation: int, members: list[Member], replica_sets: dict[int, str]) -> None: ...

    def lost(self, session: Session) -> None:
        if session.other(self).name == "coordinator" and session.ends[0] is self:
            self.after(0.03, self.ask)
