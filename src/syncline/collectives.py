"""Collectives: what the workers of a job do together, with no server between them; see docs/guides/collectives.md.

On NumPy arrays and torch tensors. Every rank of a group makes the same calls in the same order; a rank that does
not is named by a CollectiveError, which every rank gets. With `wait=False` a call returns a ticket (`.done()`,
`.wait(timeout_seconds)`), and the arrays in it are left alone until it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from syncline.worker.collectives.calls import Ticket
from syncline.worker.collectives.groups import Group
from syncline.worker.collectives.verbs import Collectives
from syncline.worker.current import current_job

__all__ = [
    "Group",
    "Ticket",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_",
    "empty",
    "gather",
    "group",
    "recv",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "restart",
    "scatter",
    "send",
]


def _mine() -> Collectives:
    return current_job().collectives


def group(ranks: Iterable[int]) -> Group:
    """The workers that have these ranks now; to be given as `group=`."""
    return _mine().group(ranks)


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> Any:
    """An array of zeros in memory that the workers of this host share: collectives use it where it lies.

    A NumPy array; for a dtype of torch (`torch.float32`) a tensor.
    """
    return _mine().empty(shape, dtype)


def restart(step: int = 0, state: Iterable[Any] = ()) -> int:
    """All workers begin again together, from the newest state; returns its step.

    Every worker calls it: at the top of its script, and again after a CollectiveError. It returns when all workers
    that are there have called it; a call that another worker makes instead fails at that worker. `step`: how far this
    worker has come; all get the largest one. `state`: arrays and tensors, which the call overwrites with those of the
    worker that has that step (of several, the lowest rank); the same number, shapes and dtypes at all workers.
    """
    return _mine().restart(step, state)


def all_reduce(x: Any, op: str = "sum", *, group: Group | None = None, wait: bool = True) -> Any:
    """The sum of all ranks' x, or `average`, `min`, `max`, `product`: a new array, equal bit by bit at all ranks."""
    return _mine().all_reduce(x, op, group, wait)


def all_reduce_(x: Any, op: str = "sum", *, group: Group | None = None, wait: bool = True) -> Any:
    """The same in place; returns x."""
    return _mine().all_reduce(x, op, group, wait, in_place=True)


def reduce(x: Any, root: int = 0, op: str = "sum", *, group: Group | None = None, wait: bool = True) -> Any:
    """As `all_reduce`, for the root alone: the others get None."""
    return _mine().reduce(x, root, op, group, wait)


def reduce_(x: Any, root: int = 0, op: str = "sum", *, group: Group | None = None, wait: bool = True) -> Any:
    """The same in place at the root; returns x, which stays as it is at the others."""
    return _mine().reduce(x, root, op, group, wait, in_place=True)


def reduce_scatter(
    x: Any, op: str = "sum", *, splits: Sequence[int] | None = None, out: Any = None, group: Group | None = None,
    wait: bool = True,
) -> Any:  # fmt: skip
    """All ranks' x are reduced, and each rank gets its piece of the first dimension: as even as possible, or by
    `splits`, a size for each rank."""
    return _mine().reduce_scatter(x, op, splits, out, group, wait)


def all_gather(x: Any, *, out: Any = None, group: Group | None = None, wait: bool = True) -> Any:
    """All ranks' x, one behind the other along the first dimension, which may differ; single numbers become a row."""
    return _mine().all_gather(x, out, group, wait)


def gather(x: Any, root: int = 0, *, out: Any = None, group: Group | None = None, wait: bool = True) -> Any:
    """As `all_gather`, for the root alone: the others get None."""
    return _mine().gather(x, root, out, group, wait)


def broadcast(x: Any = None, root: int = 0, *, group: Group | None = None, wait: bool = True) -> Any:
    """The root's x, at all ranks. The others need not give anything; what they give must have its shape and dtype."""
    return _mine().broadcast(x, root, group, wait)


def broadcast_(x: Any, root: int = 0, *, group: Group | None = None, wait: bool = True) -> Any:
    """The same in place; returns x."""
    return _mine().broadcast(x, root, group, wait, in_place=True)


def scatter(
    x: Any = None, root: int = 0, *, splits: Sequence[int] | None = None, out: Any = None,
    group: Group | None = None, wait: bool = True,
) -> Any:  # fmt: skip
    """Each rank gets its piece of the root's x: a list of arrays, one for each rank, or an array, whose first
    dimension is cut as evenly as possible, or by `splits`."""
    return _mine().scatter(x, root, splits, out, group, wait)


def all_to_all(x: Any, *, splits: Sequence[int] | None = None, group: Group | None = None, wait: bool = True) -> Any:
    """Each rank gives a piece to every rank, as in `scatter`; a list of the pieces for this one, rank by rank."""
    return _mine().all_to_all(x, splits, group, wait)


def send(x: Any, to: int, *, group: Group | None = None, wait: bool = True) -> Any:
    """Gives x to the worker of this rank, which must be in the group; returns when it has taken it, by `recv`."""
    return _mine().pairs.send(x, to, group, wait)


def recv(source: int, *, out: Any = None, group: Group | None = None, wait: bool = True) -> Any:
    """What the worker of this rank, which must be in the group, sends to this one, in the order in which it does."""
    return _mine().pairs.recv(source, out, group, wait)


def barrier(*, group: Group | None = None, wait: bool = True) -> Any:
    """Returns when all ranks are here. No round waits for those at `job.barrier`; here they are waited for."""
    return _mine().barrier(group, wait)
