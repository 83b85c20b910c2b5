"""The tables of the wire: the number of each message, and who may say it.

A frame holds one message; its number on the wire is its place in `MESSAGES`.
"""

from __future__ import annotations

from syncline.core.collecting import (
    Broken,
    Chunk,
    Describe,
    Goodbye,
    Offer,
    Piece,
    Share,
    Take,
    Taken,
    Through,
    Unshare,
    Withdraw,
)
from syncline.core.control import (
    AskCopies,
    AskRoster,
    AskServerStats,
    AskStats,
    AskStatus,
    AskWhy,
    Barrier,
    Beat,
    Died,
    Enter,
    Entered,
    GiveCopies,
    GivenCopies,
    GivenServerStats,
    GivenStats,
    GivenStatus,
    GivenWhy,
    Host,
    Install,
    Join,
    Joined,
    Leave,
    LetGo,
    Over,
    Passed,
    Prepare,
    Prepared,
    Register,
    Registered,
    Rejoin,
    Report,
    Retire,
    Roster,
    Scale,
    SeedTo,
    Standings,
    Uploaded,
    Watch,
)
from syncline.core.handing import (
    AskLease,
    AskUses,
    Confirm,
    EndShard,
    GaveBack,
    GivenLease,
    LeaveEpoch,
    Opened,
    OpenEpoch,
    Recall,
    Uses,
)
from syncline.core.measuring import (
    AskReading,
    AskStint,
    Attend,
    Begin,
    Begun,
    Called,
    Come,
    GivenReading,
    GivenStint,
    Own,
    WriteOwn,
    WrittenOwn,
)
from syncline.core.message import Done, Message, Refused
from syncline.core.metrics import Metrics, Steer
from syncline.core.pacing import Pace
from syncline.core.saving import (
    AskTakenUp,
    CloseGate,
    EndSave,
    Expect,
    Finish,
    GateClosed,
    GivenTakenUp,
    Mark,
    Noted,
    OpenGate,
    Save,
    Saved,
    TakeUp,
    WriteMarked,
    WriteScript,
    WrittenMarked,
    WrittenScript,
)
from syncline.core.traffic import (
    AskClip,
    AskHosted,
    AskPlace,
    AskState,
    Attach,
    CommitStaged,
    Committed,
    GiveClip,
    GivenPlace,
    GivenState,
    Hosted,
    HostSum,
    Introduce,
    Lend,
    LendSums,
    LoadState,
    Map,
    Mapped,
    Pin,
    Prefer,
    Pull,
    Pulled,
    Replicate,
    Replicated,
    Rest,
    Restore,
    Seed,
    Stage,
    Unpin,
    Upload,
    Verified,
    Verify,
    Vote,
    WholeSum,
)

PROTOCOL = 10
ROLES = ("coordinator", "server", "worker", "launcher")

MESSAGES: tuple[type[Message], ...] = (
    Done, Refused, Join, Joined, Rejoin, Roster, AskRoster, Beat, Enter, Entered, Retire, Scale, AskStatus,
    GivenStatus, Register, Registered, Uploaded, Barrier, Passed, Report, AskStats, GivenStats, Leave, Watch,
    Standings, Died, Host, Prepare, Prepared, Install, SeedTo, AskCopies, GivenCopies, GiveCopies,
    AskServerStats, GivenServerStats, Over, AskWhy, GivenWhy, Upload, Attach, AskHosted, Hosted, Map, Mapped,
    Restore, Lend, Seed, LetGo, Replicate, Replicated, Stage, CommitStaged, Committed, AskClip, GiveClip, Prefer,
    Rest, AskPlace, GivenPlace, Pull, Pulled, Verify, Verified, Pin, Unpin, AskState, GivenState, LoadState,
    OpenEpoch, Opened, AskLease, GivenLease, Recall, GaveBack, LeaveEpoch, EndShard, AskUses, Uses, Confirm,
    Pace, Save, Saved, Expect, WriteScript, WrittenScript, EndSave, CloseGate, GateClosed, Mark, OpenGate,
    WriteMarked, WrittenMarked, TakeUp, AskTakenUp, GivenTakenUp, Finish, Noted, Metrics, Steer,
    Come, Called, Attend, Begin, Begun, AskStint, GivenStint, AskReading, GivenReading,
    Own, WriteOwn, WrittenOwn,
    Describe, Chunk, Through, Broken, Share, Unshare, Goodbye, Offer, Take, Piece, Taken, Withdraw,
    Vote, Introduce, LendSums, HostSum, WholeSum,
)  # fmt: skip
KIND = {message: number for number, message in enumerate(MESSAGES)}

#: Which role may ask what. Answers may come from anyone who was asked.
MAY_SAY: dict[str, frozenset[type[Message]]] = {
    "worker": frozenset({
        Join, Rejoin, AskRoster, Beat, Enter, Register, Uploaded, Barrier, Report, AskStats, Leave, Upload,
        Attach, AskHosted, Map, Restore, Stage, CommitStaged, GiveClip, Rest, AskPlace, Pull, Verify, Pin,
        Unpin, AskState, LoadState, AskWhy, Prefer, OpenEpoch, AskLease, LeaveEpoch, EndShard, Save,
        AskTakenUp, Finish, Metrics, Come, Attend, Begin, AskStint, AskReading, Own,
        Describe, Chunk, Through, Broken, Share, Unshare, Goodbye, Offer, Take, Piece, Taken, Withdraw,
    }),
    "server": frozenset({
        Join, Rejoin, AskRoster, Beat, Retire, Leave, Lend, Seed, Replicate, Vote, Introduce,
        LendSums, HostSum, WholeSum,
    }),
    "coordinator": frozenset({
        Host, AskServerStats, Over, Roster, Retire, Prepare, LetGo, Install, SeedTo, AskCopies, GiveCopies,
        Recall, AskUses, Confirm, Pace, Expect, WriteScript, EndSave, CloseGate, Mark, OpenGate, WriteMarked, TakeUp,
        Steer, Called, WriteOwn,
    }),
    "launcher": frozenset({
        Watch, Died, Scale, AskStatus, AskWhy, Pace, Save,
    }),
}  # fmt: skip
