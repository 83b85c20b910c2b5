"""Messages between a job's launcher and its agents, which start members on other hosts for it."""

from __future__ import annotations

import msgspec

from syncline.core.wire.message import Message


class HeldMember(msgspec.Struct, frozen=True, array_like=True):
    """A member that an agent has started for an earlier launcher of its job; it may have ended since."""

    number: int
    plan: bytes  # JSON of a MemberPlan
    has_ended: bool = False


class AgentJoin(Message, frozen=True):
    """An agent is there; answered with `Done`, or refused."""

    host: str
    number: int  # of its task, or its place in the order of agents
    python: str  # versions, which all hosts of a job have in common
    syncline: str
    torch: str  # empty: not installed
    members: list[HeldMember] = []


class AgentAlive(Message, frozen=True):
    """A sign of life of an agent, without an answer."""


class StartMember(Message, frozen=True):
    """To an agent: starts a member. All further messages about it name this number."""

    number: int
    plan: bytes  # JSON of a MemberPlan


class TellMember(Message, frozen=True):
    """To an agent: words for a member's lifeline; `ends` closes it."""

    number: int
    words: bytes = b""
    ends: bool = False


class SignalMember(Message, frozen=True):
    """To an agent: a signal for a member and what it has started itself."""

    number: int
    signal: int


class MemberOutput(Message, frozen=True):
    """From an agent: what a member has written."""

    number: int
    data: bytes


class MemberEnded(Message, frozen=True):
    """From an agent: a member has ended, and all of its output was sent. `trouble`: it could not be started."""

    number: int
    code: int
    trouble: str = ""


class EndAgent(Message, frozen=True):
    """To an agent: the job is over; the agent ends with this exit code."""

    code: int


class StopJob(Message, frozen=True):
    """To the launcher of a detached job: the job ends. `at_once`: without a save."""

    at_once: bool = False
