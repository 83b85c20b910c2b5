"""The connection to another server, and what is sent over it until it is acknowledged."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.patience import PATIENCE

from syncline.core.members import Member
from syncline.errors import ConnectionLost
from syncline.net.reliable_send import Partner


class Connection:
    """As far as a partner looks at it."""

    is_open = True

    def close(self) -> None:
        self.is_open = False


def test_a_partner_that_is_closed_during_a_dial_keeps_no_connection() -> None:
    """A reconfiguration closes it while a thread dials: the connection came after that, and stayed open for ever."""
    dials, answers, made = threading.Event(), threading.Event(), Connection()
    told: list[str] = []

    def dial(member: Member) -> Any:
        dials.set()
        assert answers.wait(PATIENCE)
        return made

    member = Member("server-1", "server", 2, "local")
    partner = Partner(member, dial, is_of_our_kind=True, submit=lambda action: action(), log=told.append)

    def connect() -> None:
        with pytest.raises(ConnectionLost, match="server-1 is out"):
            partner.connect()
        told.append("refused")

    thread = threading.Thread(target=connect)
    thread.start()
    assert dials.wait(PATIENCE)
    partner.close()
    answers.set()
    thread.join(PATIENCE)
    assert told == ["refused"] and not made.is_open and partner.current() is None
