"""Where a worker computes: found without loading a framework that the script has not loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from syncline.core.members import Member
from syncline.errors import ConfigError


def choose_device(said: str, members: Iterable[Member], host: str, local_rank: int) -> str:
    """What was said at launch; `auto`: a GPU of its own, where there are enough for all workers of this host."""
    torch = sys.modules.get("torch")
    if said != "auto":
        if said.startswith("cuda") and torch is not None and not torch.cuda.is_available():
            raise ConfigError(f"--device {said}: torch sees no GPU here; leave it out, or say cpu")
        return said
    num_local = sum(member.role == "worker" and member.host == host for member in members)
    num_gpus = torch.cuda.device_count() if torch is not None else 0
    # Those who have finished keep their ranks, and are no members any more.
    return f"cuda:{local_rank}" if num_gpus >= max(num_local, local_rank + 1) else "cpu"
