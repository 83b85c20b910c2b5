"""The number of threads that torch computes with, in a process that loaded torch before this number was known.

A library reads OMP_NUM_THREADS when it is loaded. A forked member has torch loaded already, so what the launcher
or the script's first lines put into the environment is told to torch here.
"""

from __future__ import annotations

import sys
from typing import Any

from syncline import config as configuration

_settled: int | None = None  # None: torch was not loaded before the script


def settle() -> None:
    """In a member, before its script runs: tells torch, where it is loaded, what the launcher has said."""
    torch = sys.modules.get("torch")
    if torch is not None:
        _tell(torch)


def settle_again() -> None:
    """In `init()`: a script may have set the variable before its `import torch`; its torch.set_num_threads wins."""
    torch: Any = sys.modules.get("torch")
    if _settled is not None and torch.get_num_threads() == _settled:
        _tell(torch)


def _tell(torch: Any) -> None:
    global _settled
    if number := configuration.said_threads():
        torch.set_num_threads(number)
    _settled = torch.get_num_threads()
