"""The base class of messages, and two general replies."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base class of all messages."""


class Done(Message, frozen=True):
    """Success, without a result."""


class Refused(Message, frozen=True):
    """The error raised on the other side."""

    error: str
    reason: str
