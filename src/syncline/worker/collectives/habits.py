"""Calls that are made again and again with little data: what is said of them is kept as bytes, and compared so."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import msgspec
import numpy as np

from syncline.core.collectives import INLINE_BYTES
from syncline.core.wire.collectives import Describe
from syncline.net import frame
from syncline.worker.collectives.reducing import Reducer

#: Of one group; a script has few.
MOST_HABITS = 256
_encode = msgspec.msgpack.Encoder().encode


class Habit:
    """What is said of a call every time, but for its number: the same by all ranks, or they do not agree."""

    def __init__(self, said: Describe, reducer: Reducer | None = None) -> None:
        self.reducer = reducer
        body, group = frame.encode(msgspec.structs.replace(said, number=0)), _encode(said.group)
        at = body.index(group) + len(group)
        assert body[at] == 0, "the number comes behind the group"
        self._before, self._after = body[:at], body[at + 1 :]

    def body(self, number: int) -> bytes:
        """Of the call of this number, as it goes over the wire."""
        return self._before + _encode(number) + self._after


def plain(x: Any) -> np.ndarray[Any, Any] | None:
    """The numbers of an array or tensor where they lie, if they are few and NumPy knows them."""
    if type(x) is not np.ndarray:
        torch = sys.modules.get("torch")
        if torch is None or type(x) is not torch.Tensor or not x.is_cpu or x.layout is not torch.strided:
            return None
        if x.dtype in (torch.bfloat16, torch.float16) or x.is_conj() or x.is_neg():
            return None
        x = x.detach().numpy()
    if not 0 < x.nbytes <= INLINE_BYTES:
        return None
    flags, dtype = x.flags, x.dtype
    return x if flags.c_contiguous and flags.writeable and dtype.isnative and dtype.char != "e" else None


def kind_of(verb: str, op: str, numbers: np.ndarray[Any, Any], *, of_torch: bool) -> Hashable:
    """The same for all calls of which the same is said."""
    return verb, op, numbers.dtype, numbers.shape, of_torch
