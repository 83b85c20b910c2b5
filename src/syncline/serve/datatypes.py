"""The types of the Open Inference Protocol, what a model takes and returns, and the errors that callers get."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from syncline.errors import ConfigError

Array = npt.NDArray[Any]

#: The protocol's names. Its BYTES and BF16 are not served: neither is a NumPy type.
DATATYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in (
        ("BOOL", "?"),
        ("UINT8", "<u1"),
        ("UINT16", "<u2"),
        ("UINT32", "<u4"),
        ("UINT64", "<u8"),
        ("INT8", "<i1"),
        ("INT16", "<i2"),
        ("INT32", "<i4"),
        ("INT64", "<i8"),
        ("FP16", "<f2"),
        ("FP32", "<f4"),
        ("FP64", "<f8"),
    )
}
_NAMES = {kind: name for name, kind in DATATYPES.items()}
MAX_DIMENSIONS = 32
ANY = -1  # a length that may vary
_SAID = re.compile(r"([^:,\s]+):([A-Z0-9]+)(?::([-0-9,]*))?")


class RequestError(Exception):
    """A request that gets an error object. `status` is that of HTTP; gRPC has a code for each."""

    def __init__(self, status: int, message: str, retry_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.retry_seconds = status, retry_seconds


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model. The first dimension is the batch; no shape: not known."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None

    def check(self, datatype: str, shape: Sequence[int]) -> None:
        """Raises RequestError for what this input does not take."""
        if datatype != self.datatype:
            raise RequestError(400, f"input {self.name!r} has datatype {datatype}; the model takes {self.datatype}")
        if self.shape is None:
            if not shape:
                raise RequestError(400, f"input {self.name!r} has shape []; its first dimension must be the batch")
        elif len(shape) != len(self.shape) or any(
            ours not in (ANY, given) for ours, given in zip(self.shape, shape, strict=True)
        ):
            raise RequestError(
                400,
                f"input {self.name!r} has shape {list(shape)}; the model takes {list(self.shape)} "
                "(-1: any length; the first is the batch)",
            )
        if 0 in shape:
            raise RequestError(
                400, f"input {self.name!r} has shape {list(shape)}: it is empty; send at least one row"
            )

    def described(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape or (ANY,))}


def datatype_of(kind: np.dtype[Any]) -> str | None:
    """The protocol's name of a NumPy type; None if it has none."""
    return _NAMES.get(kind.newbyteorder("<"))


def spec_of(name: str, example: Array) -> TensorSpec:
    """What an input must be, by an example with a batch in front."""
    datatype = datatype_of(example.dtype)
    if datatype is None or not example.ndim:
        raise ConfigError(
            f"the example of input {name!r} is {example.dtype} of shape {example.shape}; give an array of one of "
            f"{', '.join(DATATYPES)} whose first dimension is the batch"
        )
    return TensorSpec(name, datatype, (ANY, *example.shape[1:]))


def parse_spec(text: str) -> TensorSpec:
    """`image:FP32:1,28,28`: a name, a datatype, and the shape of one row; -1 is any length."""
    found = _SAID.fullmatch(text)
    if found is None or found[2] not in DATATYPES:
        raise ConfigError(
            f"--input {text!r}: give NAME:DATATYPE:SHAPE of one row, e.g. image:FP32:1,28,28; "
            f"datatypes: {', '.join(DATATYPES)}"
        )
    try:
        shape = tuple(int(word) for word in (found[3] or "").split(",") if word)
    except ValueError:
        shape = (0,)
    if any(length < 1 and length != ANY for length in shape) or len(shape) >= MAX_DIMENSIONS:
        raise ConfigError(f"--input {text!r}: the shape of one row is positive numbers, or -1 for any length")
    return TensorSpec(found[1], found[2], (ANY, *shape) if found[3] is not None else None)


def check_shape(name: str, shape: Sequence[int], num_bytes_at_most: int, item_bytes: int) -> int:
    """The number of items of a shape that came from outside; bounded before memory is allocated."""
    if len(shape) > MAX_DIMENSIONS or any(length < 0 for length in shape):
        raise RequestError(
            400, f"input {name!r} has shape {list(shape)[:8]}: at most {MAX_DIMENSIONS} lengths, from 0"
        )
    num_items = math.prod(shape)
    if num_items * item_bytes > num_bytes_at_most:
        raise RequestError(400, f"input {name!r} of shape {list(shape)} is larger than a request may be")
    return num_items
