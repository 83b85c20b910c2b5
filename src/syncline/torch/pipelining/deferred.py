"""`deferred_init`: a model is built without memory, and each process of a pipeline makes only its own part of it.

Inside the context tensors are on the `meta` device, and what is computed for them is written down. `materialise`
repeats it for the tensors that are wanted. Random numbers are drawn for the others too, tensor by tensor, and thrown
away: so values are those that the model has without `deferred_init`, bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from syncline.errors import ConfigError

_META, _CPU = torch.device("meta"), torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """A tensor without memory: which storage, and what part of it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Call(NamedTuple):
    """One operation. `writes`: the storages that it changes or makes."""

    function: Any
    args: Any
    options: Any
    reads: frozenset[int]
    writes: frozenset[int]
    outputs: tuple[_View, ...]
    is_random: bool
    state: torch.Tensor | None  # of the generator, where the script has set it


class Tape:
    """What was computed in one context."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._storages: dict[int, Any] = {}  # kept alive: else their numbers would be given again
        self._state: torch.Tensor | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta and _number(tensor) in self._storages

    def record(self, function: Any, args: Any, options: Any, output: Any) -> None:
        reads, outputs = list[torch.Tensor](), list[torch.Tensor]()
        _collect(reads, (args, options))
        _collect(outputs, output)
        if not any(tensor.is_meta for tensor in (*reads, *outputs)):
            return
        written = list[torch.Tensor]()
        for position, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                _collect(written, args[position] if position < len(args) else options.get(argument.name))
        for tensor in (*reads, *outputs):
            if tensor.is_meta:
                self._storages[_number(tensor)] = tensor.untyped_storage()
        known = frozenset(_number(tensor) for tensor in reads if tensor.is_meta)
        made = frozenset(_number(tensor) for tensor in outputs if tensor.is_meta) - known
        changed = frozenset(_number(tensor) for tensor in written if tensor.is_meta)
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        state = self._new_state() if is_random else None
        self._calls.append(
            _Call(
                function,
                _described(args),
                _described(options),
                known,
                made | changed,
                tuple(_view(tensor) for tensor in outputs if tensor.is_meta),
                is_random,
                state,
            )
        )

    def record_whole(self, function: Any, tensor: torch.Tensor, options: dict[str, Any]) -> None:
        """A function that does nothing to a tensor without memory, as one operation."""
        self._storages[_number(tensor)] = tensor.untyped_storage()
        number = frozenset([_number(tensor)])
        self._calls.append(_Call(function, (_view(tensor),), options, number, number, (), True, self._new_state()))

    def _new_state(self) -> torch.Tensor | None:
        """The state of the generator, where the script has set it since the last call."""
        now = torch.get_rng_state()
        if self._state is not None and torch.equal(now, self._state):
            return None
        self._state = now
        return now

    @torch.no_grad()
    def replay(self, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values of these tensors."""
        needed = {_number(tensor) for tensor in wanted}
        kept = set(needed)
        counts: list[bool] = []
        for call in reversed(self._calls):
            counts.append(is_needed := bool(call.writes & needed))
            if is_needed:
                needed |= call.reads
        counts.reverse()
        last = {number: index for index, call in enumerate(self._calls) for number in call.reads | call.writes}
        memory: dict[int, torch.Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            for index, (call, is_needed) in enumerate(zip(self._calls, counts, strict=True)):
                if call.state is not None:
                    torch.set_rng_state(call.state)
                if is_needed:
                    self._repeat(call, memory)
                elif call.is_random:
                    self._repeat(call, {})  # for the numbers that it draws
                for number in call.reads | call.writes:
                    if last[number] == index and number not in kept:
                        memory.pop(number, None)
        return [_real(_view(tensor), memory) for tensor in wanted]

    def _repeat(self, call: _Call, memory: dict[int, torch.Tensor]) -> None:
        args = tree_map(lambda one: _real(one, memory) if isinstance(one, _View) else one, call.args)
        options = tree_map(lambda one: _real(one, memory) if isinstance(one, _View) else one, call.options)
        if options.get("device") == _META:
            options["device"] = _CPU
        found = list[torch.Tensor]()
        _collect(found, call.function(*args, **options))
        for view, tensor in zip(call.outputs, found, strict=False):
            if view.storage not in memory:
                memory[view.storage] = tensor


def _number(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: torch.Tensor) -> _View:
    stride, offset = tuple(tensor.stride()), int(tensor.storage_offset())
    return _View(_number(tensor), tensor.dtype, tuple(tensor.shape), stride, offset)


def _real(view: _View, memory: dict[int, torch.Tensor]) -> torch.Tensor:
    """The tensor over its memory; where nothing was computed for it yet, over new memory."""
    base = memory.get(view.storage)
    if base is None:
        end = view.offset + 1 + sum((n - 1) * s for n, s in zip(view.size, view.stride, strict=True))
        base = memory[view.storage] = torch.empty(max(0, end), dtype=view.dtype)
    whole = torch.empty(0, dtype=view.dtype)
    return whole.set_(base.untyped_storage(), view.offset, view.size, view.stride)


def _collect(found: list[torch.Tensor], given: Any) -> None:
    tree_map(lambda one: found.append(one) if isinstance(one, torch.Tensor) else None, given)


def _described(given: Any) -> Any:
    return tree_map(lambda one: _view(one) if isinstance(one, torch.Tensor) and one.is_meta else one, given)


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if options.get("generator") is not None:
            raise ConfigError(_NO_GENERATOR)
        if any(argument.name == "device" for argument in func._schema.arguments):
            options["device"] = _META
        output = func(*args, **options)
        self._tape.record(func, args, options, output)
        return output


class _LookOut(TorchFunctionMode):
    """Some of `torch.nn.init` ask whether their tensor has memory, and else return at once. Hears the question."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            frame = sys._getframe(1)
            if frame.f_globals.get("__name__") == torch.nn.init.__name__:
                _, *names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
                options = {name: frame.f_locals[name] for name in names}
                if options.pop("generator", None) is not None:
                    raise ConfigError(_NO_GENERATOR)
                self._tape.record_whole(getattr(torch.nn.init, frame.f_code.co_name), args[0], options)
        return func(*args, **(kwargs or {}))


_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_NO_GENERATOR = "deferred_init: give no generator to random functions; seed with torch.manual_seed"
_tapes: list[Tape] = []


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Builds a model without memory: `with deferred_init(): model = Net()`. Give it to a `Pipeline` then.

    Each process makes only the parameters of its stage, with the values that the model has without this. What reads
    values while it builds the model (`.item()`, NumPy) cannot be deferred.
    """
    tape = Tape()
    _tapes.append(tape)
    with _LookOut(tape), _Recorder(tape):
        yield


def materialise(tensors: Sequence[torch.Tensor]) -> None:
    """Makes these parameters and buffers; those that have memory stay as they are."""
    for tape in _tapes:
        wanted = [tensor for tensor in tensors if tape.has(tensor)]
        if wanted:
            for tensor, value in zip(wanted, tape.replay(wanted), strict=True):
                replace(tensor, value)
    lost = next((tensor for tensor in tensors if tensor.is_meta), None)
    if lost is not None:
        raise ConfigError(
            f"Pipeline: a tensor of shape {tuple(lost.shape)} is on the meta device and was not made in "
            "`with syncline.torch.deferred_init():`: there are no values for it"
        )


def forget() -> None:
    """All models are made: what was written down is needed no more."""
    _tapes.clear()


def replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """This very tensor lies there from now on, also if it had no memory."""
    if not tensor.is_meta:
        tensor.data = value
        return
    made: torch.Tensor = value.detach()
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, made)
