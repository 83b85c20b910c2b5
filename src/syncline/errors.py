"""Everything Syncline raises on purpose, as one tree.

SynclineError
├── ConfigError            what was typed at launch, in syncline.toml or in init() cannot be
│   └── WrongLauncher      torchrun, mpirun or srun started this process, which only `syncline run` can do
├── LayoutError            parameters that do not fit the job's layout
├── RuleError              a rule that does not exist, or that cannot update this parameter
├── DataError              a data set that is missing or damaged
├── StoreError             what must be remembered cannot be kept on disk, or what was kept cannot be used
│   └── DamagedError       what was kept is not what it was; trouble with a disk or a store is none
├── ProtocolError          what came over a connection breaks the protocol
│   ├── FrameError         a frame cut short, too long, or not ours
│   ├── TokenError         the other side does not know the job's token
│   └── VersionError       the other side speaks another version of the protocol
├── ConnectionLost         the other side is gone
│   └── NoAnswer           the other side listens, and has not answered yet
├── CollectiveError        ranks did not call the same collective, or one is gone; all of them get it
├── Refresh                the sender knows an older generation; it fetches the roster and repeats
├── FencedError            this process has been replaced or evicted
├── WaitTimeout            a wait passed its deadline; says for whom it waited
└── JobFailed              the job has ended without success; names the member and the reason

A message names the job, the member, the parameter and the remedy, as far as they are known.

Beside the tree: `Stopped`, which is no error. It ends the script of a job that a rule has stopped.
"""

from __future__ import annotations


class SynclineError(Exception):
    """The root of the tree: catch this to catch all of ours."""


class ConfigError(SynclineError, ValueError):
    """What was typed at launch, in syncline.toml or in init() cannot be."""


class WrongLauncher(ConfigError):
    """torchrun, mpirun or srun started this process, which only `syncline run` can do."""


class LayoutError(SynclineError, ValueError):
    """Parameters that do not fit the job's layout."""


class RuleError(SynclineError, ValueError):
    """A rule that does not exist, or that cannot update this parameter."""


class DataError(SynclineError):
    """A data set that is missing or damaged."""


class StoreError(SynclineError):
    """What must be remembered cannot be kept on disk, or what was kept cannot be used."""


class DamagedError(StoreError):
    """What was kept is not what it was; trouble with a disk or a store is none."""


class ProtocolError(SynclineError):
    """What came over a connection breaks the protocol."""


class FrameError(ProtocolError):
    """A frame cut short, too long, or not ours."""


class TokenError(ProtocolError):
    """The other side does not know the job's token."""


class VersionError(ProtocolError):
    """The other side speaks another version of the protocol."""


class ConnectionLost(SynclineError, ConnectionError):
    """The other side is gone."""


class NoAnswer(ConnectionLost):
    """The other side listens, and has not answered yet; its process may still be starting."""


class CollectiveError(SynclineError):
    """Ranks did not call the same collective, or one is gone; every rank of the group gets the same error."""


class Refresh(SynclineError):
    """The sender knows an older generation: it fetches the roster and repeats what it said."""


class FencedError(SynclineError):
    """This process has been replaced or evicted; it must not go on."""


class WaitTimeout(SynclineError, TimeoutError):
    """A wait passed its deadline; the message says for whom it waited."""


class JobFailed(SynclineError):
    """The job has ended without success; names the member and the reason."""


class Stopped(SystemExit):
    """Training is over by a rule, and this worker has left the job: its script ends, with exit code 0.

    It is no `Exception`, so that `except Exception` in a training loop does not catch it. To do something after
    training, ask `job.should_stop` before each step, or catch it.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(0)
        self.reason = reason  #: which rule it was, and on what value

    def __str__(self) -> str:
        return self.reason


def _tree(root: type[SynclineError]) -> dict[str, type[SynclineError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def to_wire(error: BaseException) -> tuple[str, str]:
    """The name and the message under which an error crosses a connection."""
    if isinstance(error, SynclineError):
        return type(error).__name__, str(error)
    return "SynclineError", f"{type(error).__name__}: {error}"


def from_wire(name: str, message: str) -> SynclineError:
    """The error that the other side raised; an unknown name becomes the root of the tree."""
    return _tree(SynclineError).get(name, SynclineError)(message)
