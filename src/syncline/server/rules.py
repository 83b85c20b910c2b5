"""Rules at work: torch optimizers on the pieces of a slice, and how a round's gradients become one."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from syncline.core.layout import INTEGERS, Segment, Slice
from syncline.core.rule import OPTIONS, PLAIN, Option, RuleSpec, check_state
from syncline.core.wire.traffic import StateEntry
from syncline.errors import ProtocolError, RuleError
from syncline.net.transport import buffer_of
from syncline.server.averages import Averages
from syncline.server.fused import FUSED, FusedKernel
from syncline.server.homes import Home
from syncline.server.scratch import scratch

_FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
_NO_FOREACH = frozenset({"Muon"})  # has no such option
_HALF = (torch.float16, torch.bfloat16)
Bytes = npt.NDArray[np.uint8]
#: One contribution to a slice: its bytes, its weight, and which pieces it has.
Source = tuple[torch.Tensor, float, Sequence[bool]]


def tensor_of(array: Bytes, dtype: str) -> torch.Tensor:
    """The bytes as a tensor, without a copy; a read-only mapping stays unwritten by our own discipline."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array).view(getattr(torch, dtype))


class SliceRules:
    """The rules of one slice: a torch optimizer per group over this slice's pieces."""

    def __init__(self, segment: Segment, part: Slice, memory: Bytes, home: Home) -> None:
        self.segment, self.part = segment, part
        self.pieces = segment.pieces(part)
        self._home, self.host = home, tensor_of(memory, part.dtype)
        self.flat = home.numbers(self.host, part)
        self._item_bytes = self.flat.element_size()
        self._reduce, self._is_integer = segment.reduce, part.dtype in INTEGERS
        self._specs = [segment.rule_of(segment.parameters[piece.parameter]) for piece in self.pieces]
        self._groups = [segment.parameters[piece.parameter].group for piece in self.pieces]
        self._assigns = [spec.name == "Assign" for spec in self._specs]
        self._parameters = [self._parameter(index) for index in range(len(self.pieces))]
        groups = set(self._groups)
        #: The one group that all pieces belong to, where its rule is a torch optimizer.
        self._only_group = groups.pop() if len(groups) == 1 and self._specs[0].name not in PLAIN else None
        self._splits: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        #: Called once, before anything of this slice or its state is changed: it is marked for a save.
        self.before_change: Callable[[bool], None] | None = None
        self._averages = Averages(self._parameters, [not assigns for assigns in self._assigns], home.decay)
        self._begin(self._make_optimizers())

    def about_to_change(self, waits: bool = True) -> None:
        """Under the slice's lock: who has marked it keeps it as it is; `waits`: for memory, if need be."""
        keep, self.before_change = self.before_change, None
        if keep is not None:
            keep(waits)

    def _begin(self, optimizers: dict[int, torch.optim.Optimizer]) -> None:
        """Steps with these optimizers from now on, by their kernels where they have one."""
        self._optimizers = optimizers
        self._overridden: frozenset[int] = frozenset()  # groups whose settings are not the registered ones now
        self._bare_steps = {group: bare_step(optimizer) for group, optimizer in optimizers.items()}
        self._kernels = {
            group: FusedKernel(optimizer)
            for group, optimizer in optimizers.items()
            if self.segment.rules[group].name in FUSED and optimizer.defaults.get("fused")
        }

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A slice-shaped tensor as its pieces, shaped as the parameters are."""
        return [self.view(flat, k).view_as(parameter) for k, parameter in enumerate(self._parameters)]

    def _staged_pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The same for staged bytes, which lie where they lie as long as the job lasts: worked out once."""
        known = self._splits.get(id(flat))
        if known is None or known[0] is not flat:
            known = self._splits[id(flat)] = (flat, self._split(flat))
        return known[1]

    def forget_staged(self) -> None:
        """Some of the memory that gradients lay in is gone."""
        self._splits.clear()

    # -- a round's gradient, as a backup gets it ----------------------------------------------------------

    def lay_down(self, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor) -> list[int]:
        """Copies a round's gradient into slice-shaped host memory; returns the pieces that there are."""
        has = [index for index, gradient in enumerate(gradients) if gradient is not None]
        for index in has:
            gradient, place = gradients[index], self.view(flat, index)
            assert gradient is not None
            if gradient.data_ptr() != place.data_ptr():  # else it was combined there
                place.copy_(gradient.reshape(-1))
        return has

    def as_pieces(self, flat: torch.Tensor, has: Sequence[int]) -> list[torch.Tensor | None]:
        """The same read back, by either side: the gradient of each piece, where rules can use it."""
        found: list[torch.Tensor | None] = [None] * len(self.pieces)
        if has:
            at_home = self.flat is self.host
            pieces = self._staged_pieces(flat) if at_home else self._split(self._home.bring(flat))
            for index in has:
                found[index] = pieces[index]
        return found

    def bytes_of_pieces(self, array: Bytes, has: Sequence[int]) -> list[memoryview]:
        """Where these pieces lie in slice-shaped memory."""
        found = []
        for index in has:
            piece = self.pieces[index]
            view = array[piece.offset : piece.offset + piece.num_items * self._item_bytes]
            found.append(buffer_of(view))
        return found

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """One piece of a slice-shaped tensor."""
        piece = self.pieces[index]
        start = piece.offset // self._item_bytes
        return flat[start : start + piece.num_items]

    def _parameter(self, index: int) -> torch.Tensor:
        view = self.view(self.flat, index)
        if self._specs[index].elementwise:
            return view
        return view.view(self.segment.parameters[self.pieces[index].parameter].shape)

    def _make_optimizers(self) -> dict[int, torch.optim.Optimizer]:
        made = {}
        for group in dict.fromkeys(self._groups):
            spec = self.segment.rules[group]
            if spec.name not in PLAIN:
                members = [p for p, g in zip(self._parameters, self._groups, strict=True) if g == group]
                made[group] = make_optimizer(spec, members)
        return made

    # -- a round's gradients become one -------------------------------------------------------------------

    def reduced(
        self, sources: Sequence[Source], round_weight: float, into: torch.Tensor | None = None
    ) -> list[torch.Tensor | None]:
        """One gradient per piece: the mean or sum over the sources; None where nobody pushed the piece.

        The mean divides by the weight of the whole round, except for `Assign`: by the weight of those who pushed.
        `into`: slice-shaped host memory, where it is needed; what takes a computation is put there by it.
        """
        place = into if self.flat is self.host else None
        if not self.pieces:
            return []
        if len(sources) == 1 and self._is_used_as_it_lies(*sources[0], round_weight):
            return list(self._staged_pieces(sources[0][0]))
        sources = [(self._home.bring(t), w, has) for t, w, has in sources]
        everywhere = all(all(has) for _, _, has in sources) and not any(self._assigns)
        if everywhere:
            flat = self._combine([(t, w) for t, w, _ in sources], round_weight, into=place)
            return list(self._split(flat))
        found: list[torch.Tensor | None] = []
        for index, assigns in enumerate(self._assigns):
            here = [(self.view(t, index), w) for t, w, has in sources if has[index]]
            total = sum(w for _, w in here) if assigns else round_weight
            start = self.pieces[index].offset // self._item_bytes
            combined = self._combine(here, total, start, assigns, place) if here else None
            found.append(None if combined is None else combined.view_as(self._parameters[index]))
        return found

    def _is_used_as_it_lies(self, staged: torch.Tensor, weight: float, has: Sequence[bool], total: float) -> bool:
        """Whether a single contribution is the round's gradient, without a copy of it."""
        is_here = staged.device == self.flat.device
        return is_here and (weight == total or self._reduce == "sum") and all(has)

    def _combine(
        self,
        sources: list[tuple[torch.Tensor, float]],
        total: float,
        start: int = 0,
        mean: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Σ wᵢgᵢ / Σ wᵢ, or Σ gᵢ, in the order given. A single full-weight source is used where it lies."""
        averaged = mean or self._reduce == "mean"
        if len(sources) == 1 and (not averaged or sources[0][1] == total):
            return sources[0][0]
        first = sources[0][0]
        size = first.numel()
        result = scratch(first.dtype, self.flat, start, size) if into is None else into[start : start + size]
        if averaged and self._is_integer:
            wide = sum((t.to(torch.float64) * w for t, w in sources[1:]), first.to(torch.float64) * sources[0][1])
            return result.copy_((wide / total).round_())
        # Halves are summed in single precision.
        is_half = first.dtype in _HALF
        total_of = scratch(torch.float32, self.flat, start, first.numel()) if is_half else result
        weights = [w for _, w in sources]
        equal = not averaged or all(w == weights[0] for w in weights)
        if equal and len(sources) > 1 and not is_half:
            torch.add(first, sources[1][0], out=total_of)
            rest = sources[2:]
        else:
            total_of.copy_(first)  # `out=` would still compute in the type of the sources
            rest = sources[1:]
            if not equal:
                total_of.mul_(weights[0])
        for tensor, weight in rest:
            total_of.add_(tensor, alpha=1 if equal else weight)
        if averaged:
            total_of.div_(total / weights[0] if equal else total)
        return result.copy_(total_of) if is_half else result

    # -- applying -----------------------------------------------------------------------------------------

    def squared_norm(self, gradients: Sequence[torch.Tensor | None]) -> float:
        """Of the gradients of rules that descend; what is added or assigned does not count."""
        total = 0.0
        for gradient, spec in zip(gradients, self._specs, strict=True):
            if gradient is not None and spec.name not in PLAIN:
                total += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        return total

    def apply(
        self,
        gradients: Sequence[torch.Tensor | None],
        overrides: Mapping[int, Mapping[str, Option]],
        scale: float = 1.0,
    ) -> None:
        """Updates the pieces that have a gradient."""
        if self.before_change is not None:
            self.about_to_change()
        if not self._averages.is_on:
            self._apply(gradients, overrides, scale)
            return
        self._averages.begin()
        self._apply(gradients, overrides, scale)
        self._averages.follow()

    def _apply(
        self,
        gradients: Sequence[torch.Tensor | None],
        overrides: Mapping[int, Mapping[str, Option]],
        scale: float,
    ) -> None:
        given = [gradient for gradient in gradients if gradient is not None]
        if scale == 1.0 and self._only_group is not None and len(given) == len(self._parameters):
            pairs = list(zip(self._parameters, given, strict=True))
            self._step(self._only_group, pairs, overrides.get(self._only_group, {}))
            self._home.publish(self.flat, self.host)
            return
        stepping: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for parameter, gradient, spec, group in zip(
            self._parameters, gradients, self._specs, self._groups, strict=True
        ):
            if gradient is None:
                continue
            if gradient.shape != parameter.shape:
                gradient = gradient.view_as(parameter)
            if spec.name == "Add":
                parameter.add_(gradient)
            elif spec.name == "Assign":
                parameter.copy_(gradient)
            else:
                stepping.setdefault(group, []).append((parameter, gradient * scale if scale != 1.0 else gradient))
        for group, pairs in stepping.items():
            self._step(group, pairs, overrides.get(group, {}))
        self._home.publish(self.flat, self.host)

    def uploaded(self) -> None:
        """The first values are here."""
        self._home.load(self.flat, self.host)

    def _step(
        self, group: int, pairs: list[tuple[torch.Tensor, torch.Tensor]], override: Mapping[str, Option]
    ) -> None:
        optimizer = self._optimizers[group]
        settings = optimizer.param_groups[0]
        if override or group in self._overridden:
            known = OPTIONS[self.segment.rules[group].name]
            settings.update((key, value) for key, value in optimizer.defaults.items() if key in known)
            settings.update(override)
            self._overridden = self._overridden | {group} if override else self._overridden - {group}
        kernel = self._kernels.get(group) if len(pairs) == len(settings["params"]) else None
        if kernel is not None and kernel.step([gradient for _, gradient in pairs], settings):
            return
        try:
            for parameter, gradient in pairs:
                parameter.grad = gradient
            with torch.no_grad(), _unfused_where_it_cannot(optimizer, pairs):
                self._bare_steps[group](optimizer)
        finally:
            # A gradient may lie in a worker's arena: it is let go as soon as it is used.
            for parameter, _ in pairs:
                parameter.grad = None

    # -- state --------------------------------------------------------------------------------------------

    def state(self) -> list[tuple[StateEntry, torch.Tensor]]:
        """Everything the rules remember about this slice, tensor by tensor, in host memory."""
        return [(entry, tensor.detach().contiguous().cpu()) for entry, tensor in self.live_state()]

    def live_state(self) -> Iterator[tuple[StateEntry, torch.Tensor]]:
        """The same where it lies."""
        self._home.settle()
        for index, parameter in enumerate(self._parameters):
            optimizer = self._optimizers.get(self._groups[index])
            for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
                if value is not None:
                    tensor = torch.as_tensor(value)
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    yield StateEntry(self.part.id, index, key, dtype, tuple(tensor.shape)), tensor
            yield from self._averages.entries(self.part.id, index)

    def load_state(self, entries: Sequence[tuple[StateEntry, torch.Tensor]]) -> None:
        """Takes over this state; pieces that are not named start afresh."""
        self.about_to_change()
        fresh: dict[int, dict[str, torch.Tensor]] = {}
        for entry, tensor in self._averages.load(entries):
            if not 0 <= entry.piece < len(self.pieces):
                raise ProtocolError(f"state for piece {entry.piece} of slice {self.part.id}")
            self._check_state(entry)
            fresh.setdefault(entry.piece, {})[entry.key] = tensor.to(self.flat.device, copy=True)
        optimizers = self._make_optimizers()
        for group in {self._groups[index] for index in fresh}:
            optimizers[group].state.clear()
        for index, state in fresh.items():
            optimizers[self._groups[index]].state[self._parameters[index]] = state
        self._begin(optimizers)

    def _check_state(self, entry: StateEntry) -> None:
        of = (self.part.dtype, tuple(self._parameters[entry.piece].shape))
        check_state(self._specs[entry.piece].name, entry.key, entry.dtype, entry.shape, of)


@contextlib.contextmanager
def _unfused_where_it_cannot(
    optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """torch's fused SGD wants the momentum of all parameters or of none; with a new one among them it is not used."""
    settings = optimizer.param_groups[0]
    has = {"momentum_buffer" in optimizer.state.get(parameter, {}) for parameter, _ in pairs}
    if not (settings.get("fused") and isinstance(optimizer, torch.optim.SGD) and len(has) > 1):
        yield
        return
    settings["fused"], settings["foreach"] = False, False
    try:
        yield
    finally:
        settings["fused"], settings["foreach"] = True, None


def is_fused(name: str, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether torch has a fused kernel for this rule, and a right one."""
    # Of SGD on halves on a CPU it is wrong (torch 2.13: off by a tenth of the update, from 16 items on).
    wrong = name == "SGD" and any(p.dtype in _HALF and p.device.type == "cpu" for p in parameters)
    return name in _FUSED and not wrong


def make_optimizer(spec: RuleSpec, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The torch optimizer of a rule, fused where torch has it; torch's own complaint becomes a RuleError."""
    kind = getattr(torch.optim, spec.name, None)
    if kind is None:
        raise RuleError(f"this torch ({torch.__version__}) has no {spec.name}")
    how = {"fused": True} if is_fused(spec.name, parameters) else {"foreach": False}
    if spec.name in _NO_FOREACH:
        how = {}
    try:
        made: torch.optim.Optimizer = kind(parameters, **spec.options, **how)
    except (TypeError, ValueError) as error:
        raise RuleError(f"rule {spec.name}: {error}") from None
    return made


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """`step` without torch's hooks and profiling around it, which take longer than a small update itself."""
    step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(type(optimizer).step)
    return step
