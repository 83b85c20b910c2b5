"""The Open Inference Protocol over HTTP: JSON and its binary extension, to arrays and back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from syncline.serve.datatypes import DATATYPES, Array, RequestError, TensorSpec, check_shape, datatype_of

HEADER_LENGTH = b"inference-header-content-length"
_MOST_TENSORS = 1024
_encode = msgspec.json.encode


class _InputHead(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] | None = None


class _OutputHead(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _InferBody(msgspec.Struct):
    inputs: list[_InputHead]
    id: str = ""
    parameters: dict[str, Any] | None = None
    outputs: list[_OutputHead] | None = None


class _PlainBody(msgspec.Struct, forbid_unknown_fields=True):
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    version: str = ""


@dataclasses.dataclass(slots=True)
class InferRequest:
    """A request, checked: each input of the model as an array with the same number of rows."""

    inputs: dict[str, Array]
    num_rows: int
    id: str = ""
    outputs: Mapping[str, bool] | None = None  #: the wanted ones, and whether in binary; None: all
    is_binary: bool = False  #: of outputs that are not named
    is_single: bool = False  #: /predict with one row


_infer_decoder = msgspec.json.Decoder(_InferBody)
_plain_decoder = msgspec.json.Decoder(_PlainBody)
_named_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any_decoder = msgspec.json.Decoder()
_ITEMS: dict[str, type] = {"b": bool, "u": int, "i": int, "f": float}


@functools.cache
def _list_decoder(kind: str, depth: int) -> msgspec.json.Decoder[Any]:
    """Of numbers in lists, nested so deep: at most `MAX_DIMENSIONS` for each kind are made."""
    items: Any = _ITEMS[kind]
    for _ in range(depth):
        items = list[items]
    return msgspec.json.Decoder(items)


class Protocol:
    """Requests and answers of one model."""

    def __init__(self, name: str, inputs: Sequence[TensorSpec], most_bytes: int) -> None:
        self._name, self._most_bytes = name, most_bytes
        self._inputs = {spec.name: spec for spec in inputs}

    def decode(self, body: bytes, header_length: bytes | None) -> InferRequest:
        """A request of `/infer`. `header_length`: of the JSON, where binary data follows."""
        rest = memoryview(b"")
        if header_length is not None:
            if not header_length.isdigit() or len(header_length) > 12 or int(header_length) > len(body):
                raise RequestError(
                    400, "Inference-Header-Content-Length must be a number up to the length of the body"
                )
            rest = memoryview(body)[int(header_length) :]
            body = body[: int(header_length)]
        head: _InferBody = _decoded(_infer_decoder, body)
        if len(head.inputs) > _MOST_TENSORS:
            raise RequestError(400, f"{len(head.inputs)} inputs; at most {_MOST_TENSORS}")
        found: dict[str, Array] = {}
        for one in head.inputs:
            if one.name in found:
                raise RequestError(400, f"input {one.name!r} is given twice")
            kind, num_items = self._place(one.name, one.datatype, one.shape)
            size = (one.parameters or {}).get("binary_data_size")
            if size is not None:
                if one.data is not msgspec.UNSET:
                    raise RequestError(
                        400, f"input {one.name!r} has both data and binary_data_size; send one of them"
                    )
                array, rest = _take(one.name, rest, size, kind, num_items)
            elif one.data is msgspec.UNSET:
                raise RequestError(400, f"input {one.name!r} has no data; send data or binary_data_size")
            else:
                array = _from_json(one.name, one.data, kind, num_items, one.shape)
            found[one.name] = array.reshape(one.shape)
        if len(rest):
            raise RequestError(400, f"the body has {len(rest)} bytes more than its inputs describe")
        is_binary = (head.parameters or {}).get("binary_data_output") is True
        outputs = None if head.outputs is None else dict(_wanted(one, is_binary) for one in head.outputs)
        return self.checked(found, head.id, outputs or None, is_binary)

    def decode_plain(self, body: bytes) -> tuple[InferRequest, str]:
        """A request of `/predict`, and the version that it names: `{"input": row}` or `{"inputs": [rows]}`; with
        several inputs an object with each by its name.
        """
        head: _PlainBody = _decoded(_plain_decoder, body)
        is_single = head.input is not msgspec.UNSET
        if is_single == (head.inputs is not msgspec.UNSET):
            raise RequestError(400, 'send {"input": …} for one row, or {"inputs": [ …, … ]} for several')
        given = bytes(head.input if is_single else head.inputs)  # type: ignore[arg-type]  # one of them is there
        if len(self._inputs) == 1 and not given.startswith(b"{"):
            by_name: dict[str, Any] = {next(iter(self._inputs)): given}
        else:
            by_name = {name: bytes(data) for name, data in _decoded(_named_decoder, given).items()}
        found = {name: self._plain(self._spec(name), data, is_single) for name, data in by_name.items()}
        request = self.checked(found)
        request.is_single = is_single
        return request, head.version

    def checked(
        self,
        found: dict[str, Array],
        id: str = "",
        outputs: Mapping[str, bool] | None = None,
        is_binary: bool = False,
    ) -> InferRequest:
        """A request with every input, finite, of equally many rows."""
        num_rows = 0
        in_order = {}  # the model is called with them by position, whatever the order of the request is
        for name, spec in self._inputs.items():
            array = found.get(name)
            if array is None:
                raise RequestError(400, f"input {name!r} is missing; the model takes {', '.join(self._inputs)}")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise RequestError(400, f"input {name!r} has NaN or Inf; send finite numbers")
            if num_rows not in (0, len(array)):
                raise RequestError(400, f"input {spec.name!r} has {len(array)} rows, another one {num_rows}")
            num_rows = len(array)
            in_order[name] = array
        return InferRequest(in_order, num_rows, id, outputs, is_binary)

    def encode(self, request: InferRequest, outputs: Mapping[str, Array], version: str) -> tuple[bytes, int | None]:
        """The answer of `/infer`; and the length of its JSON if binary data follows."""
        wanted = request.outputs
        if wanted is not None and (unknown := wanted.keys() - outputs.keys()):
            raise RequestError(400, f"there is no output {min(unknown)!r}; the model has {', '.join(outputs)}")
        heads, tails = [], []
        for name in outputs if wanted is None else wanted:
            array = outputs[name]
            head = b'{"name":%s,"datatype":"%s","shape":%s,' % (
                _encode(name),
                _datatype(name, array).encode(),
                _encode(array.shape),
            )
            if request.is_binary if wanted is None else wanted[name]:
                data = array.tobytes()
                tails.append(data)
                heads.append(b'%s"parameters":{"binary_data_size":%d}}' % (head, len(data)))
            else:
                heads.append(b'%s"data":%s}' % (head, _to_json(name, array.ravel())))
        id = b'"id":%s,' % _encode(request.id) if request.id else b""
        body = b'{"model_name":%s,"model_version":%s,%s"outputs":[%s]}' % (
            _encode(self._name),
            _encode(version),
            id,
            b",".join(heads),
        )
        return (b"".join([body, *tails]), len(body)) if tails else (body, None)

    def encode_plain(self, request: InferRequest, outputs: Mapping[str, Array], version: str) -> bytes:
        """The answer of `/predict`."""
        rows = {name: array[0] if request.is_single else array for name, array in outputs.items()}
        if len(rows) == 1:
            ((name, row),) = rows.items()
            data = _to_json(name, row)
        else:
            data = b"{%s}" % b",".join(b"%s:%s" % (_encode(name), _to_json(name, row)) for name, row in rows.items())
        key = b"output" if request.is_single else b"outputs"
        return b'{"%s":%s,"model_name":%s,"model_version":%s}' % (key, data, _encode(self._name), _encode(version))

    def from_bytes(self, name: str, datatype: str, shape: Sequence[int], data: bytes) -> Array:
        """An input whose data is its bytes."""
        kind, num_items = self._place(name, datatype, shape)
        array, rest = _take(name, memoryview(data), num_items * kind.itemsize, kind, num_items)
        if len(rest):
            raise RequestError(400, f"input {name!r} has {len(data)} bytes; its shape needs {array.nbytes}")
        return array.reshape(shape)

    def from_numbers(self, name: str, datatype: str, shape: Sequence[int], numbers: Sequence[Any]) -> Array:
        """An input whose data is a flat sequence of numbers."""
        kind, num_items = self._place(name, datatype, shape)
        if len(numbers) != num_items:
            raise RequestError(
                400, f"input {name!r} has {len(numbers)} numbers; its shape {list(shape)} needs {num_items}"
            )
        return _array(name, list(numbers), kind).reshape(shape)

    def _place(self, name: str, datatype: str, shape: Sequence[int]) -> tuple[np.dtype[Any], int]:
        """The type and the number of items of an input that the model takes."""
        self._spec(name).check(_known(name, datatype), shape)
        kind = DATATYPES[datatype]
        return kind, check_shape(name, shape, self._most_bytes, kind.itemsize)

    def _spec(self, name: str) -> TensorSpec:
        spec = self._inputs.get(name)
        if spec is None:
            raise RequestError(400, f"there is no input {name!r}; the model takes {', '.join(self._inputs)}")
        return spec

    def _plain(self, spec: TensorSpec, data: bytes, is_single: bool) -> Array:
        kind = DATATYPES[spec.datatype]
        row = spec.shape[1:] if spec.shape is not None else None
        if is_single and row is not None and -1 not in row:
            array = _from_json(spec.name, data, kind, math.prod(row), row).reshape(1, *row)
        else:
            array = _nested(spec.name, data, kind, None if spec.shape is None else len(spec.shape) - is_single)
            array = array[np.newaxis] if is_single else array
        spec.check(spec.datatype, array.shape)
        return array


def error_body(message: str) -> bytes:
    """The protocol's error object."""
    return _encode({"error": message})


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"the request is not as the protocol says: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None


def _known(name: str, datatype: str) -> str:
    if datatype not in DATATYPES:
        raise RequestError(400, f"input {name!r} has datatype {datatype!r}; served are {', '.join(DATATYPES)}")
    return datatype


def _wanted(one: _OutputHead, is_binary: bool) -> tuple[str, bool]:
    parameters = one.parameters or {}
    if parameters.get("classification"):
        raise RequestError(400, f"output {one.name!r}: classification is not served; take the numbers")
    said = parameters.get("binary_data", is_binary)
    if not isinstance(said, bool):
        raise RequestError(400, f"output {one.name!r}: binary_data must be true or false")
    return one.name, said


def _take(name: str, rest: memoryview, size: Any, kind: np.dtype[Any], num_items: int) -> tuple[Array, memoryview]:
    if not isinstance(size, int) or isinstance(size, bool) or size != num_items * kind.itemsize:
        raise RequestError(
            400, f"input {name!r} has binary_data_size {size!r}; its shape needs {num_items * kind.itemsize} bytes"
        )
    if size > len(rest):
        raise RequestError(400, f"input {name!r} has {size} bytes, and the body ends after {len(rest)} of them")
    if kind.kind == "b":
        raw = np.frombuffer(rest[:size], np.uint8)
        if raw.size and raw.max() > 1:
            raise RequestError(400, f"input {name!r} is BOOL; each byte must be 0 or 1")
        return raw.view(np.bool_), rest[size:]
    return np.frombuffer(rest[:size], kind), rest[size:]


def _from_json(
    name: str, data: bytes | msgspec.Raw, kind: np.dtype[Any], num_items: int, shape: Sequence[int]
) -> Array:
    """Numbers that lie flat, or nested as the shape says."""
    try:
        flat = _list_decoder(kind.kind, 1).decode(data)
    except msgspec.ValidationError:
        array = _nested(name, bytes(data), kind, len(shape))
        if array.ndim != 1 and array.shape != tuple(shape):
            raise RequestError(
                400, f"the data of input {name!r} is nested as {list(array.shape)}; its shape is {list(shape)}"
            ) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(400, f"the data of input {name!r} is not JSON: {error}") from None
    else:
        array = _decoded_array(flat, kind) if kind.kind in "fb" else _array(name, flat, kind)
    if array.size != num_items:
        raise RequestError(400, f"input {name!r} has {array.size} numbers; its shape {list(shape)} needs {num_items}")
    return array


def _nested(name: str, data: bytes, kind: np.dtype[Any], depth: int | None) -> Array:
    """`depth`: how deep it should be nested; None: that is not known."""
    if depth is not None and kind.kind in "fb":
        # What is as it should be takes a third of the time. What is not is read again, to say what is wrong.
        with contextlib.suppress(msgspec.DecodeError, RecursionError, ValueError):
            return _decoded_array(_list_decoder(kind.kind, depth).decode(data), kind)
    return _array(name, _decoded(_any_decoder, data), kind)


def _decoded_array(lists: Any, kind: np.dtype[Any]) -> Array:
    """Of floats or booleans, which nothing but the decoder has checked."""
    with np.errstate(over="ignore"):  # a number that is too large becomes Inf, which is refused later
        return np.array(lists, kind)


def _array(name: str, data: Any, kind: np.dtype[Any]) -> Array:
    """Raises RequestError for what NumPy would convert although it is another type: text, null, 1.5 for an INT32."""
    try:
        if kind.kind == "f":
            found = np.array(data, np.float64)
            if found.size and np.abs(found).max() > np.finfo(kind).max:
                raise RequestError(400, f"input {name!r} has a number that is too large for its datatype")
            if not isinstance(data, list | float | int) or _has_text(data):
                raise ValueError("numbers are expected")
            return found.astype(kind)
        loose = np.array(data)
        if (loose.size and (loose.dtype.kind == "b") != (kind.kind == "b")) or loose.dtype.kind not in "biuf":
            raise ValueError("true and false are for BOOL only, and BOOL takes nothing else")
        if loose.size and loose.dtype.kind == "f":
            raise ValueError("whole numbers are expected")
        found = loose.astype(kind)
        if loose.size and not np.array_equal(found, loose):
            raise OverflowError("a number does not fit into its datatype")
        return found
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(400, f"the data of input {name!r} cannot be used: {str(error).split(';')[0]}") from None


def _has_text(data: Any) -> bool:
    """Whether nested lists hold text, null or true: NumPy would make numbers of them."""
    if not isinstance(data, list):
        return type(data) not in (int, float)
    kinds = set(map(type, data))
    if list not in kinds:
        return not kinds <= {int, float}
    return any(map(_has_text, data))


def _datatype(name: str, array: Array) -> str:
    datatype = datatype_of(array.dtype)
    if datatype is None:
        raise RequestError(500, f"output {name!r} is {array.dtype}, which the protocol does not have")
    return datatype


def _to_json(name: str, array: Array) -> bytes:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(500, f"output {name!r} has NaN or Inf, which JSON cannot carry; ask for binary data")
    return _encode(array.tolist())
