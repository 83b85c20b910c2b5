"""Rules at work: torch optimizers on the pieces of a slice, and how a round's gradients become one."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from syncline.core.layout import INTEGERS, Segment, Slice
from syncline.core.messages import StateEntry
from syncline.core.rule import PLAIN, Option, RuleSpec
from syncline.errors import ProtocolError, RuleError

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

    def __init__(self, segment: Segment, part: Slice, memory: Bytes) -> None:
        self.segment, self.part = segment, part
        self.pieces = segment.pieces(part)
        self.flat = tensor_of(memory, part.dtype)
        self._item_bytes = self.flat.element_size()
        self._reduce, self._is_integer = segment.reduce, part.dtype in INTEGERS
        self._specs = [segment.rule_of(segment.parameters[piece.parameter]) for piece in self.pieces]
        self._groups = [segment.parameters[piece.parameter].group for piece in self.pieces]
        self._assigns = [spec.name == "Assign" for spec in self._specs]
        self._parameters = [self._parameter(index) for index in range(len(self.pieces))]
        self._optimizers = self._make_optimizers()
        self._bare_steps = {group: bare_step(optimizer) for group, optimizer in self._optimizers.items()}

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

    def reduced(self, sources: Sequence[Source], round_weight: float) -> list[torch.Tensor | None]:
        """One gradient per piece: the mean or sum over the sources; None where nobody pushed the piece.

        The mean divides by the weight of the whole round, except for `Assign`: by the weight of those who pushed.
        """
        if not self.pieces:
            return []
        everywhere = all(all(has) for _, _, has in sources) and not any(self._assigns)
        if everywhere:
            flat = self._combine([(t, w) for t, w, _ in sources], round_weight)
            return [self.view(flat, index) for index in range(len(self.pieces))]
        found: list[torch.Tensor | None] = []
        for index, assigns in enumerate(self._assigns):
            here = [(self.view(t, index), w) for t, w, has in sources if has[index]]
            total = sum(w for _, w in here) if assigns else round_weight
            start = self.pieces[index].offset // self._item_bytes
            found.append(self._combine(here, total, start, mean=assigns) if here else None)
        return found

    def _combine(
        self, sources: list[tuple[torch.Tensor, float]], total: float, start: int = 0, mean: bool = False
    ) -> torch.Tensor:
        """Σ wᵢgᵢ / Σ wᵢ, or Σ gᵢ, in the order given. A single full-weight source is used where it lies."""
        averaged = mean or self._reduce == "mean"
        if len(sources) == 1 and (not averaged or sources[0][1] == total):
            return sources[0][0]
        first = sources[0][0]
        if averaged and self._is_integer:
            wide = sum((t.to(torch.float64) * w for t, w in sources), torch.zeros((), dtype=torch.float64))
            return torch.as_tensor(wide / total).round_().to(first.dtype)
        scratch = _scratch(self.flat, start, first.numel())
        weights = [w for _, w in sources]
        equal = not averaged or all(w == weights[0] for w in weights)
        if equal and len(sources) > 1:
            torch.add(first, sources[1][0], out=scratch)
            rest = sources[2:]
        else:
            torch.mul(first, 1.0 if equal else weights[0], out=scratch)
            rest = sources[1:]
        for tensor, weight in rest:
            scratch.add_(tensor, alpha=1 if equal else weight)
        if averaged:
            scratch.div_(total / weights[0] if equal else total)
        return scratch if scratch.dtype == first.dtype else scratch.to(first.dtype)

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
    ) -> bool:
        """Updates the pieces that have a gradient; whether anything changed."""
        changed = False
        stepping: set[int] = set()
        for parameter, gradient, spec, group in zip(
            self._parameters, gradients, self._specs, self._groups, strict=True
        ):
            if gradient is None:
                continue
            changed = True
            if spec.name == "Add":
                parameter.add_(gradient.view_as(parameter))
            elif spec.name == "Assign":
                parameter.copy_(gradient.view_as(parameter))
            else:
                parameter.grad = (gradient * scale if scale != 1.0 else gradient).view_as(parameter)
                stepping.add(group)
        for group in stepping:
            self._step(group, overrides.get(group, {}))
        return changed

    def _step(self, group: int, override: Mapping[str, Option]) -> None:
        optimizer = self._optimizers[group]
        settings = optimizer.param_groups[0]
        registered = self.segment.rules[group].options
        settings.update(registered)
        settings.update(override)
        try:
            with torch.no_grad():
                self._bare_steps[group](optimizer)
        finally:
            # A gradient may lie in a worker's arena: it is let go as soon as it is used.
            for parameter in settings["params"]:
                parameter.grad = None

    # -- state --------------------------------------------------------------------------------------------

    def state(self) -> list[tuple[StateEntry, torch.Tensor]]:
        """Everything the rules remember about this slice, tensor by tensor."""
        found = []
        for index, parameter in enumerate(self._parameters):
            optimizer = self._optimizers.get(self._groups[index])
            for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
                if value is not None:
                    tensor = torch.as_tensor(value).detach().contiguous()
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    entry = StateEntry(self.part.id, index, key, dtype, tuple(tensor.shape))
                    found.append((entry, tensor))
        return found

    def load_state(self, entries: Sequence[tuple[StateEntry, torch.Tensor]]) -> None:
        """Takes over this state; pieces that are not named start afresh."""
        fresh: dict[int, dict[str, torch.Tensor]] = {}
        for entry, tensor in entries:
            if not 0 <= entry.piece < len(self.pieces):
                raise ProtocolError(f"state for piece {entry.piece} of slice {self.part.id}")
            fresh.setdefault(entry.piece, {})[entry.key] = tensor.clone()
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
        for index, state in fresh.items():
            optimizer = self._optimizers[self._groups[index]]
            optimizer.state[self._parameters[index]] = state
        for group, optimizer in list(self._optimizers.items()):
            if not optimizer.state:
                spec = self.segment.rules[group]
                members = [p for p, g in zip(self._parameters, self._groups, strict=True) if g == group]
                self._optimizers[group] = make_optimizer(spec, members)


def make_optimizer(spec: RuleSpec, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The torch optimizer of a rule, fused where torch has it; torch's own complaint becomes a RuleError."""
    kind = getattr(torch.optim, spec.name, None)
    if kind is None:
        raise RuleError(f"this torch ({torch.__version__}) has no {spec.name}")
    how = {"fused": True} if spec.name in _FUSED else {"foreach": False}
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


_local = threading.local()


def _scratch(flat: torch.Tensor, start: int, num_items: int) -> torch.Tensor:
    """This thread's own scratch for one slice; halves are summed in single precision."""
    dtype = torch.float32 if flat.dtype in _HALF else flat.dtype
    kept: dict[torch.dtype, torch.Tensor] = _local.__dict__.setdefault("scratch", {})
    if dtype not in kept or kept[dtype].numel() < flat.numel():
        kept[dtype] = torch.empty(flat.numel(), dtype=dtype)
    return kept[dtype][start : start + num_items]
