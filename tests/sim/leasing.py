"""What a coordinator's twin does about leases: the core's queue answers; it keeps, confirms and hands back."""

from __future__ import annotations

from typing import Any

from syncline.core.leasing.queue import LeaseQueue
from syncline.core.slice_state import Identity
from syncline.core.wire.leases import LeaseAck

from .planning import Planning
from .world import Frame, Session

#: Between two saves of what was used; and how long somebody waits before what others do not fetch is given to it.
KEEP_SECONDS, RECLAIM_SECONDS = 0.2, 1.0
#: For slice 0's server to say what of the dead counts.
ASK_SECONDS, AGAIN_SECONDS = 0.3, 0.02
LOADER = "loader"


class Leasing(Planning):
    """Samples, handed out."""

    def open_desk(self) -> None:
        self.lease_queue: LeaseQueue[tuple[Session, int]] = LeaseQueue(self.membership)
        if "reuse_lease" in self.job.bugs:
            epochs = self.state.leases.epochs.get(LOADER, {}).values()
            self.state.leases.next_lease = 1 + max((n for epoch in epochs for n in epoch.leases), default=0)
        self.handing_back: dict[str, Any] | None = None
        self.kept_at = self.back_later = 0.0
        self.recalls: dict[
            tuple[str, int], tuple[tuple[str, int], Session | None]
        ] = {}  # name and epoch: whom, where
        self.kept_first: list[tuple[Session, str, Any]] = []  # answers that are given when the state is kept

    def what(self) -> str:
        leases = [
            (number, epoch.todo, list(epoch.leases.values()))
            for number, epoch in self.state.leases.epochs.get(LOADER, {}).items()
        ]
        return f" leases {leases} asking {self.lease_queue.asking} recalled {self.lease_queue.leasing.recalled}"

    # -- what workers say ---------------------------------------------------------------------------------

    def _may_ask(self, session: Session, frame: Frame) -> bool:
        return self._is_member(frame) and self.membership.formed and not session.is_ghost

    def _hears(self, session: Session, frame: Frame) -> bool:
        """Nothing of what comes over a connection that was replaced."""
        is_latest = session is self.links.get(frame.name) or "word_of_before" in self.job.bugs
        return self._may_ask(session, frame) and is_latest

    def _reply(self, session: Session, kind: str, body: Any) -> None:
        self.answer(session, Frame(kind, "coordinator", 0, self.state.generation, self.term, body))

    def on_open_epoch(self, session: Session, frame: Frame) -> None:
        if self._hears(session, frame):
            (number, data), owner = frame.body, (frame.name, frame.incarnation)
            workers = max(1, len(self.lease_queue.participants()))
            is_left = self.lease_queue.leasing.open(owner, LOADER, number, data, workers)
            self.kept_first.append((session, "opened", (number, is_left)))
            self.answer_all()

    def on_ask_lease(self, session: Session, frame: Frame) -> None:
        if self._hears(session, frame):
            number, message = frame.body
            self.lease_queue.ask((frame.name, frame.incarnation), message, (session, number), self.world.now)
            self.answer_all()
            if message.waits and self.is_alive:
                self._ask_uses()

    def on_leave_epoch(self, session: Session, frame: Frame) -> None:
        if self._hears(session, frame):
            self.lease_queue.leave((frame.name, frame.incarnation), frame.body)
            self.kept_first.append((session, "left_epoch", (frame.body.epoch,)))
            self.answer_all()

    def on_gave_back(self, session: Session, frame: Frame) -> None:
        if self._may_ask(session, frame):
            number, owner, leases, newest = frame.body  # who was meant: a new life may answer for it
            self.recalls.pop((owner, number), None)
            self.lease_queue.leasing.gave_back(owner, LOADER, number, leases, newest)
            self.answer_all()

    def answer_all(self) -> None:
        answers, recalls = self.lease_queue.answers()
        later, self.kept_first = self.kept_first, []
        must_keep = later or any(given.lease for _, given in answers)
        if must_keep and "lease_unkept" not in self.job.bugs and not self.keep():
            self.lease_queue.not_kept(answers)
            answers, later, self.kept_first = [], [], later
        for owner, recall in recalls:
            self._recall(owner, recall.epoch)
        for session, kind, body in later:
            self._reply(session, kind, body)
        for asked, given in answers:
            session, number = asked.request
            if given.lease:
                self.job.ledger.samples.lease_given(given.lease, *asked.owner, given.span)
            self._reply(session, "given_lease", (number, given))

    def _recall(self, owner: Identity, number: int) -> None:
        self.recalls[owner, number] = self.links.get(owner[0])
        self.say(owner[0], "recall", (number, owner))

    # -- what servers say ---------------------------------------------------------------------------------

    def were_used(self, acks: list[LeaseAck], late: list[LeaseAck]) -> None:
        if acks or late:
            self.lease_queue.use(acks, late)
            self.answer_all()

    def _ask_uses(self, key: Any = None) -> None:
        replica_set = self.state.replica_sets.get(0)
        if replica_set is not None:
            self.say(replica_set.primary, "ask_uses", (key,))

    def on_acks(self, session: Session, frame: Frame) -> None:
        if not self._may_ask(session, frame):
            return
        key, acks, late, waiting = frame.body
        if self.state.members[frame.name].role == "worker":
            self.lease_queue.heard((frame.name, frame.incarnation), acks, late, is_all=not waiting)
        self.were_used(acks, late)
        back = self.handing_back
        if back is not None and back["key"] == key and self.is_alive:
            self.handing_back = None
            if "back_while_open" in self.job.bugs:
                waiting = []
            self.lease_queue.out(back["gone"], waiting)
            self.keep()
            if not self.is_alive:
                return
            self.answer_all()
            self.back_later = self.world.now + AGAIN_SECONDS if set(waiting) & set(back["gone"]) else 0.0
            self.pump()

    # -- now and then -------------------------------------------------------------------------------------

    def look_at_leases(self) -> None:
        if not self.lease_queue.is_open or not self.is_alive:
            return
        self.lease_queue.reclaim(self.world.now, RECLAIM_SECONDS)
        for owner, recall in self.lease_queue.recut():
            self._recall(owner, recall.epoch)
        for (owner, number), session in list(self.recalls.items()):
            if session is None or session is not self.links.get(owner[0]):  # the question, or the answer, got lost
                del self.recalls[owner, number]
                self.lease_queue.leasing.not_recalled(owner, LOADER, number)
        self.answer_all()
        if self.lease_queue.somebody_waits and self.is_alive:
            self._ask_uses()
        for name, _ in self.lease_queue.unheard():
            self.say(name, "ask_uses", (None,))
        if self.lease_queue.has_news and self.world.now - self.kept_at > KEEP_SECONDS and self.is_alive:
            self._confirm()

    def _confirm(self) -> None:
        self.kept_at = self.world.now
        used, late, finished = self.lease_queue.take_news()
        for _, number, epoch in finished:
            self.job.ledger.samples.quarantine(number, epoch.quarantined)
        if "confirm_unkept" not in self.job.bugs and not self.keep():
            self.lease_queue.put_back_news(used, late)
            return
        replica_set = self.state.replica_sets.get(0)
        for name in replica_set.names if replica_set is not None else ():
            self.say(name, "confirm", (sorted(set(used)), sorted(set(late))))

    # -- the dead -----------------------------------------------------------------------------------------

    def hand_back(self) -> bool:
        """Leases of those who are out and fenced go to others; whether slice 0's server is asked what counts."""
        gone = self.lease_queue.gone()
        if not gone or self.world.now < self.back_later:
            return False
        back = self.handing_back = {"key": self._key(), "gone": gone}
        self._ask_uses(back["key"])
        self.after(ASK_SECONDS, lambda: self._ask_again(back))
        return True

    def _ask_again(self, back: dict[str, Any]) -> None:
        if self.handing_back is back:
            self.handing_back = None
            self.pump()

    def worker_is_out(self, owner: Identity) -> None:
        if "back_before_fence" in self.job.bugs:
            self.lease_queue.out({owner: True}, ())

    def unconfirmed(self) -> set[tuple[int, int]]:
        """What the report of lost uses is about: epochs and positions that are leased and not known to be done."""
        return {
            (number, int(position))
            for number, epoch in self.state.leases.epochs.get(LOADER, {}).items()
            for lease in epoch.leases.values()
            for span in lease.rest()
            for position in span.positions()
        }

    def acks_are_lost(self) -> None:
        """Slice 0 came back from a copy: the workers that live say what they have used."""
        if "confirmed_is_lost" in self.job.bugs:
            for epoch in self.state.leases.epochs.get(LOADER, {}).values():
                for lease in epoch.leases.values():
                    lease.done = []
        self.lease_queue.acks_are_lost()
