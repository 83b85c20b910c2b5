"""What the processes of one served model say to each other. All of them belong to one user, on one host."""

from __future__ import annotations

import msgspec

from syncline.serve.following import FollowedJob
from syncline.serve.metrics import ServingTotals
from syncline.serve.settings import ServeConfig
from syncline.serve.versions import VersionFacts, VersionStanding


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One process, for people."""

    role: str  #: `replica` or `loader`
    number: int
    pid: int
    is_up: bool
    num_restarts: int


# From the keeper.


class SetUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a process needs to begin. A replica gets the listening socket with it, the loader that of serve-ctl."""

    config: ServeConfig
    model: str  #: `model.py:Net`
    weights: str | None
    follow: FollowedJob | None
    name: str
    number: int
    threads: int  #: its part of them
    token: str = ""
    url: str = ""
    standing: VersionStanding | None = None  #: for a loader that takes over
    refused: tuple[str, ...] = ()  #: digests of versions at which loaders died
    newest: tuple[str, str] = ("", "")  #: name and digest of the version that was tried last


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To replicas: get ready for this version. A descriptor of its weights comes along, if it has any."""

    version: VersionFacts


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To replicas: nothing needs this version any more."""

    digest: str


class Switch(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To replicas: answer like this from the next batch on. All its versions were loaded."""

    number: int
    standing: VersionStanding


class TellTotals(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To replicas: say now what you have counted."""

    number: int


class TotalsOfAll(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `AskTotals`."""

    number: int
    totals: ServingTotals
    processes: tuple[ProcessFacts, ...]


class OfferAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the loader: all replicas have the version; or why one refuses it."""

    digest: str
    refusal: str


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the loader: all replicas answer as was said."""

    number: int


class EndServing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer open requests, then end."""


# To the keeper.


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This process works."""


class Up(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This process has begun."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This process ends, and why."""

    words: str
    is_store: bool = False  #: it is a StoreError


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A replica's answer to `Load`; '': it can answer with this version."""

    digest: str
    refusal: str


class Switched(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A replica's answer to `Switch`."""

    number: int


class Totals(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A replica's answer to `TellTotals`."""

    number: int
    totals: ServingTotals


class AskTotals(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What have all replicas counted?"""

    number: int


class Trying(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the loader, before it runs code on a version: if it dies now, the version may be why. '': it is done."""

    name: str
    digest: str


class OfferVersion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the loader: a version that it has tried. A descriptor of its weights comes along, if it has any."""

    version: VersionFacts


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the loader: how the versions stand from now on."""

    number: int
    standing: VersionStanding


FromKeeper = SetUp | Load | Forget | Switch | TellTotals | TotalsOfAll | OfferAnswer | Published | EndServing
ToKeeper = Beat | Up | Failed | Loaded | Switched | Totals | AskTotals | Trying | OfferVersion | Publish
