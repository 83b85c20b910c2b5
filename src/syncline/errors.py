"""Everything Syncline raises on purpose, as one tree.

SynclineError
├── ConfigError            what was typed at launch, in syncline.toml or in init() cannot be
│   └── WrongLauncher      torchrun, mpirun or srun started ranks that cannot find each other
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
    """The root of the tree: catch this to catch all of ours.

    Remedy: catch a class below where you can do something about it; the message says what failed.
    """


class ConfigError(SynclineError, ValueError):
    """What was typed at launch, in syncline.toml or in init() cannot be.

    Raised before anything is started, by `syncline run`, by `init()`, or by a call whose arguments are wrong.

    Remedy: correct the setting that the message names; a name that is close to a known one is suggested.
    """


class WrongLauncher(ConfigError):
    """torchrun, mpirun or srun started ranks that cannot find each other.

    Raised by `init()` where ranks on several hosts have no common secret or address, and where rank 0 has not
    started the job in time.

    Remedy: do what the message says, e.g. set SYNCLINE_TOKEN_FILE; or call `init(embedded=True)` if you want a
    separate training in each process.
    """


class LayoutError(SynclineError, ValueError):
    """Parameters that do not fit the job's layout.

    Raised when a worker registers or pushes a name, shape or dtype that the job does not have.

    Remedy: build the same model in every worker, and before `DistributedOptimizer` or `kv.register`.
    """


class RuleError(SynclineError, ValueError):
    """A rule that does not exist, or that cannot update this parameter.

    Raised for an unknown optimizer or option, for sparse gradients, and when an update fails on a server.

    Remedy: use an optimizer of the list at `syncline.Rule`; with `--sync-every H` any optimizer runs in the workers.
    """


class DataError(SynclineError):
    """A data set that is missing or damaged.

    Raised when data is opened or read; the message names the file, and the sample where it is known.

    Remedy: check the path, and fetch or repair the file. Parquet, Arrow and remote paths need the extra `data`.
    """


class StoreError(SynclineError):
    """What must be remembered cannot be kept on disk, or what was kept cannot be used.

    Raised for the job's journal and for checkpoints: no space, no permission, no checkpoint in a folder, or a
    checkpoint that does not fit the model.

    Remedy: check path, space and permissions; with several hosts `--checkpoint` must be a folder that all share.
    """


class DamagedError(StoreError):
    """What was kept is not what it was; trouble with a disk or a store is none.

    A file is missing, has another size, or its digest differs. Damaged bytes are never returned.

    Remedy: use an older checkpoint (`syncline checkpoint verify DIR` lists the sound ones), or the mirror's copy.
    """


class ProtocolError(SynclineError):
    """What came over a connection breaks the protocol.

    The connection is closed; other connections are not affected.

    Remedy: use the same version of Syncline in all processes; with one version it is a bug, please report it.
    """


class FrameError(ProtocolError):
    """A frame cut short, too long, or not ours.

    Also raised when another program connects to a port of the job.

    Remedy: check that nothing else uses that port; if it comes from a member of the job, please report it.
    """


class TokenError(ProtocolError):
    """The other side does not know the job's token.

    Raised when a process connects with the job file of another job, or of an earlier start.

    Remedy: start it with the `job.json` of this job: `runs/NAME/job.json`.
    """


class VersionError(ProtocolError):
    """The other side speaks another version of the protocol.

    Raised when a connection is opened.

    Remedy: install the same version of Syncline on all hosts, and start the job again.
    """


class ConnectionLost(SynclineError, ConnectionError):
    """The other side is gone.

    A job with a coordinator repairs most losses by itself; a script sees this one where it cannot.

    Remedy: see the log of the other member in `runs/NAME/`; let the exception end the worker, which is started again.
    """


class NoAnswer(ConnectionLost):
    """The other side listens, and has not answered yet; its process may still be starting.

    Raised while a connection is opened, and retried until the deadline of the start.

    Remedy: wait; if it stays, raise `--start-seconds`, or check the address and the firewall.
    """


class CollectiveError(SynclineError):
    """Ranks did not call the same collective, or one is gone; every rank of the group gets the same error.

    A collective is not retried: some ranks may have its result.

    Remedy: call `syncline.collectives.restart()` in all workers, or let the workers end and start again.
    """


class Refresh(SynclineError):
    """The sender knows an older generation: it fetches the roster and repeats what it said.

    It stays inside Syncline: no script sees it.

    Remedy: none is needed.
    """


class FencedError(SynclineError):
    """This process has been replaced or evicted; it must not go on.

    The job has gone on without it, for example after a long pause, or because a new process has its name.

    Remedy: let the exception end the process; under `syncline run` a new one is started.
    """


class WaitTimeout(SynclineError, TimeoutError):
    """A wait passed its deadline; the message says for whom it waited.

    The deadline is `wait_seconds`, or the `timeout_seconds` of the call.

    Remedy: look at the member that the message names (`syncline why JOB`, its log); raise `--wait-seconds` if it is
    only slow.
    """


class JobFailed(SynclineError):
    """The job has ended without success; names the member and the reason.

    Raised in workers that are still running when the job ends, and in those that come too late.

    Remedy: read the log of the member that the message names, in `runs/NAME/`.
    """


class Stopped(SystemExit):
    """Training is over by a rule, and this worker has left the job: its script ends, with exit code 0.

    It is no `Exception`, so that `except Exception` in a training loop does not catch it. To do something after
    training, ask `job.should_stop` before each step, or catch it.

    Remedy: none is needed; loops over `syncline.torch.DataLoader` and `job.steps(n)` end without it.
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
