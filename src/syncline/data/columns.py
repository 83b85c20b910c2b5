"""Arrow columns as NumPy arrays.

Numbers, booleans, dates, timestamps and durations become the array of their type, without a copy where Arrow allows
it. Times of day (time32, time64), for which NumPy has no type, become object arrays of `datetime.time`. Lists of one
fixed length become a 2-D array (lists of such lists: one dimension more). Strings and bytes become object arrays of
`str` and `bytes`: rows of unequal length have no fixed width, and cutting or padding them would change them. A
missing value is NaN among floats and None among strings; elsewhere it is an error.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from syncline.data.extra import needed
from syncline.data.source import Array
from syncline.errors import DataError


def as_array(column: Any, name: str, where: str) -> Array:
    """The values of an Arrow column, first dimension rows; `where`: the file, for messages."""
    arrow = needed("pyarrow", "Arrow columns")
    if isinstance(column, arrow.ChunkedArray):
        pieces = [as_array(piece, name, where) for piece in column.chunks]
        return pieces[0] if len(pieces) == 1 else _joined(pieces, name, where)
    values = column
    types, kind = arrow.types, values.type
    if types.is_dictionary(kind):
        return as_array(values.dictionary_decode(), name, where)
    if isinstance(values, arrow.ExtensionArray):
        inner, shape = as_array(values.storage, name, where), tuple(getattr(kind, "shape", None) or ())
        order = list(getattr(kind, "permutation", None) or range(len(shape)))
        if shape and order == sorted(order):  # a tensor in each row
            return inner.reshape(len(values), *shape)
        return inner
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        return _rectangle(values, name, where)
    text = (
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )
    text = text or types.is_fixed_size_binary(kind)
    if not (text or types.is_primitive(kind)):
        raise DataError(f"{where}: column '{name}' is {kind}, which has no NumPy array; leave it out with columns=")
    if values.null_count and not (text or types.is_floating(kind)):
        raise DataError(
            f"{where}: column '{name}' ({kind}) has {values.null_count:,} missing values; fill them when the file "
            "is written, write the column as a float, or leave it out with columns="
        )
    return cast("Array", values.to_numpy(zero_copy_only=False))


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialized array in Arrow's pooled memory. NumPy returns memory to the kernel after each chunk, and
    page faults take several times as long as filling it.
    """
    if dtype.hasobject:
        return np.empty(shape, dtype)
    arrow = needed("pyarrow", "Arrow columns")
    return np.ndarray(shape, dtype, buffer=arrow.allocate_buffer(math.prod(shape) * dtype.itemsize))


def unequal(name: str, where: str) -> str:
    return f"{where}: column '{name}' has lists of different lengths; pad them, or leave it out with columns="


def _joined(pieces: list[Array], name: str, where: str) -> Array:
    """Joins the chunks of a column into one array."""
    widths = {piece.shape[1:] for piece in pieces if len(piece)}
    if len(widths) > 1:
        raise DataError(unequal(name, where))
    return np.concatenate([piece for piece in pieces if len(piece)] or pieces[:1])


def _rectangle(values: Any, name: str, where: str) -> Array:
    """Lists of equal length as a 2-D array."""
    if values.null_count:
        raise DataError(
            f"{where}: column '{name}' has {values.null_count:,} missing lists; fill them, or leave it out"
        )
    if hasattr(values.type, "list_size"):
        length = values.type.list_size
    else:
        lengths = np.diff(values.offsets.to_numpy())
        length = int(lengths[0]) if lengths.size else 0
        if lengths.size and (lengths != length).any():
            other = int(lengths[lengths != length][0])
            raise DataError(
                f"{where}: column '{name}' has lists of {length} and of {other} values; only lists of one length "
                "become an array: pad them when the file is written, or leave the column out with columns="
            )
    inner = as_array(values.flatten(), name, where)
    return inner.reshape(len(values), length, *inner.shape[1:])
