"""The root of what members say to each other, and the two answers that fit every question."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The root of all messages."""


class Done(Message, frozen=True):
    """Yes, without more to say."""


class Refused(Message, frozen=True):
    """No: the error that was raised on the other side."""

    error: str
    reason: str
