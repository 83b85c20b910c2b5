"""Syncline trains one model on many processes: parameters on servers, the same script on a laptop or a cluster.

errors, config, stats      the ground: what is raised, what can be set, what is counted
core/                      pure: messages, layout, placement, policy, rounds, membership, liveness, order, splits
net/                       frames, sockets, shared memory, the in-process twin, calls
store/                     what outlives a process: the coordinator's journal
client/  roles/            inside a worker / the coordinator and the servers
torch/   data/             thin adapters, data sets
launch/                    init(), local processes, other hosts
testing/                   whole jobs inside one process
bench/                     the rows of `syncline bench`
cli/                       the command line
"""

from syncline.client.current import current_job
from syncline.client.job import Job
from syncline.core.rule import Rule
from syncline.errors import (
    ConfigError,
    ConnectionLost,
    DataError,
    FencedError,
    FrameError,
    JobFailed,
    LayoutError,
    ProtocolError,
    RuleError,
    StoreError,
    SynclineError,
    TokenError,
    VersionError,
    WaitTimeout,
)
from syncline.launch.start import init

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "ConnectionLost",
    "DataError",
    "FencedError",
    "FrameError",
    "Job",
    "JobFailed",
    "LayoutError",
    "ProtocolError",
    "Rule",
    "RuleError",
    "StoreError",
    "SynclineError",
    "TokenError",
    "VersionError",
    "WaitTimeout",
    "__version__",
    "current_job",
    "init",
]
