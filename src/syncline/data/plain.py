"""Whether a `.npy` file holds plain values or Python objects, by its header alone: objects are never unpickled."""

from __future__ import annotations

from typing import IO

import numpy as np

REMEDY = (
    "which only unpickling could read, and nothing is ever unpickled: save numbers as one array of numbers "
    '(numpy.save(path, array.astype("float32"))), text as array.astype(str), rows of different lengths filled up to '
    "one length"
)


def objects_in(file: IO[bytes]) -> str:
    """Of a `.npy` file that holds Python objects: what it holds, and how to save it. Of any other: nothing."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except (ValueError, EOFError, OSError):
        return ""
    return f"it holds Python objects (dtype {dtype}, shape {shape}), {REMEDY}" if dtype.hasobject else ""
