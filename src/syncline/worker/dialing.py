"""Making the way to a server: in a thread of its own, so that nobody waits for a host that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from syncline.core.members import Member
from syncline.errors import ConnectionLost
from syncline.net.rpc import Endpoint


class Dialing:
    """One connection under way. The dial itself may take ten seconds; given up, it ends where nobody waits."""

    def __init__(self, dial: Callable[[Member], Endpoint], member: Member) -> None:
        self.member, self._dial = member, dial
        self._change = threading.Condition()
        self._endpoint: Endpoint | None = None
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=f"dial {member.name}", daemon=True).start()

    def _run(self) -> None:
        try:
            endpoint = self._dial(self.member)
        except Exception as error:  # raised where it is waited for
            self._end(error)
            return
        with self._change:
            is_wanted = self._error is None
            if is_wanted:
                self._endpoint = endpoint
                self._change.notify_all()
        if not is_wanted:
            endpoint.close()

    def _end(self, error: Exception) -> None:
        with self._change:
            if self._endpoint is None and self._error is None:
                self._error = error
                self._change.notify_all()

    def give_up(self, reason: str) -> None:
        """From any thread: whoever waits need not wait any longer."""
        self._end(ConnectionLost(reason))

    def wait(self) -> Endpoint:
        """The connection, or what kept it from being made."""
        try:
            with self._change:
                self._change.wait_for(lambda: self._endpoint is not None or self._error is not None)
        except BaseException:
            self.give_up("nobody waits any more")
            raise
        if self._endpoint is None:
            assert self._error is not None
            raise self._error
        return self._endpoint
