"""Applies rules: torch optimizers on the pieces of a slice, and the reduction of a round's gradients."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from syncline.core.aggregate import Aggregate
from syncline.core.layout import INTEGERS, Segment, Slice
from syncline.core.rule import PLAIN, SCALES_WITH_GRADIENT, Option, RuleSpec, check_state
from syncline.core.wire.traffic import StateEntry
from syncline.errors import ConfigError, ProtocolError, RuleError
from syncline.extensions import is_named, load
from syncline.net.transport import buffer_of
from syncline.reduce.kernels import divide, narrow, sum_dtype, weighted_sum
from syncline.server.aggregation import aggregate_tensors
from syncline.server.gather import Gathered, Overrides
from syncline.server.storage import SliceStorage
from syncline.store.weights import AVERAGE_KEY

_local = threading.local()
_MOST_KEPT = 1024


def scratch(dtype: torch.dtype, flat: torch.Tensor, start: int, num_items: int) -> torch.Tensor:
    """A scratch tensor of this thread for a slice or a part of it. The same part gets the same tensor."""
    kept: dict[object, torch.Tensor] = _local.__dict__.setdefault("kept", {})
    kind = (dtype, flat.device)
    key = (kind, start, num_items)
    if key not in kept:
        if len(kept) > _MOST_KEPT:
            kept.clear()
        if kind not in kept or kept[kind].numel() < flat.numel():
            for old in [known for known in kept if known == kind or known[0] == kind]:  # type: ignore[index]
                del kept[old]
            kept[kind] = torch.empty(flat.numel(), dtype=dtype, device=flat.device)
        kept[key] = kept[kind][start : start + num_items]
    return kept[key]


FUSED = frozenset({"Adam", "AdamW", "SGD"})
#: Updates up to this size use one thread.
SMALL_ITEMS = 1 << 15
Tensors = list[torch.Tensor]


class FusedKernel:
    """Updates one parameter group in a single call, using the state that its optimizer has created."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_sgd = isinstance(optimizer, torch.optim.SGD)
        self._is_adamw = isinstance(optimizer, torch.optim.AdamW)
        self._parameters: Tensors = list(optimizer.param_groups[0]["params"])
        self._is_small = sum(parameter.numel() for parameter in self._parameters) <= SMALL_ITEMS
        self._state = optimizer.state
        self._lists: dict[str, Tensors] = {}

    def _list(self, key: str) -> Tensors | None:
        """One state tensor of each parameter; None if any parameter lacks it."""
        if key not in self._lists:
            found = [self._state[p].get(key) if p in self._state else None for p in self._parameters]
            if any(tensor is None for tensor in found):
                return None
            self._lists[key] = [tensor for tensor in found if tensor is not None]
        return self._lists[key]

    def step(self, gradients: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> bool:
        """Updates all parameters. Returns False, without effect, if the optimizer itself is needed."""
        update = self._sgd if self._is_sgd else self._adam
        count = torch.get_num_threads() if self._is_small else 1
        if count == 1:
            return update(list(gradients), settings)
        # The kernels split even tiny updates over all threads; synchronizing them takes longer than the update.
        torch.set_num_threads(1)
        try:
            return update(list(gradients), settings)
        finally:
            torch.set_num_threads(count)

    def _sgd(self, gradients: Tensors, settings: Mapping[str, Any]) -> bool:
        momentum = settings["momentum"]
        buffers = self._list("momentum_buffer") if momentum else []
        if buffers is None:
            return False
        torch._fused_sgd_(
            self._parameters,
            gradients,
            buffers,
            weight_decay=settings["weight_decay"],
            momentum=momentum,
            lr=settings["lr"],
            dampening=settings["dampening"],
            nesterov=settings["nesterov"],
            maximize=settings["maximize"],
            is_first_step=False,
        )
        return True

    def _adam(self, gradients: Tensors, settings: Mapping[str, Any]) -> bool:
        amsgrad = settings["amsgrad"]
        means, squares, steps = self._list("exp_avg"), self._list("exp_avg_sq"), self._list("step")
        largest = self._list("max_exp_avg_sq") if amsgrad else []
        if means is None or squares is None or steps is None or largest is None:
            return False
        beta1, beta2 = settings["betas"]
        decoupled = self._is_adamw or settings.get("decoupled_weight_decay")
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        torch._foreach_add_(steps, 1)
        kernel(
            self._parameters,
            gradients,
            means,
            squares,
            largest,
            steps,
            amsgrad=amsgrad,
            lr=settings["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            maximize=settings["maximize"],
        )
        return True


class Averages:
    """Running averages of the pieces that gradient rules update. They start at the values before the first update.
    Half-precision parameters are averaged in single precision. Backups with the same values and updates have the same
    averages.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], is_averaged: Sequence[bool], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self._is_averaged = [
            averaged and parameter.is_floating_point() and decay > 0.0
            for parameter, averaged in zip(parameters, is_averaged, strict=True)
        ]
        self._averages: dict[int, torch.Tensor] = {}
        self.is_on = any(self._is_averaged)

    def begin(self) -> None:
        """Before an update: starts averages that do not exist yet."""
        for index, parameter in enumerate(self._parameters):
            if self._is_averaged[index] and index not in self._averages:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._averages[index] = parameter.detach().to(wide, copy=True)

    def follow(self) -> None:
        """After an update: updates the averages."""
        for index, average in self._averages.items():
            average.lerp_(self._parameters[index].detach().to(average.dtype), 1.0 - self._decay)

    def entries(self, part: int, index: int) -> Iterator[tuple[StateEntry, torch.Tensor]]:
        """The average of one piece, in the form of rule state."""
        if (average := self._averages.get(index)) is not None:
            dtype = str(average.dtype).removeprefix("torch.")
            yield StateEntry(part, index, AVERAGE_KEY, dtype, tuple(average.shape)), average

    def load(self, entries: Sequence[tuple[StateEntry, torch.Tensor]]) -> list[tuple[StateEntry, torch.Tensor]]:
        """Loads averages from `entries` and returns the other entries. Missing averages start later."""
        found: dict[int, torch.Tensor] = {}
        for entry, tensor in entries:
            if entry.key != AVERAGE_KEY:
                continue
            if not 0 <= entry.piece < len(self._parameters):
                raise ProtocolError(f"an average for piece {entry.piece}")
            parameter = self._parameters[entry.piece]
            if self._is_averaged[entry.piece]:
                found[entry.piece] = tensor.to(parameter.device, copy=True).view_as(parameter)
        if found:
            self._averages = found
        return [(entry, tensor) for entry, tensor in entries if entry.key != AVERAGE_KEY]


_FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
_HALF = (torch.float16, torch.bfloat16)
_NO_FOREACH = frozenset({"Muon"})  # has no such option
Bytes = npt.NDArray[np.uint8]


class PushedSlice(NamedTuple):
    """One contribution to a slice: its bytes, weight and pieces, and the factor on the gradient of each piece."""

    array: torch.Tensor
    weight: float
    has: Sequence[bool]
    factors: Sequence[float] | None = None  # None: 1

    def factor(self, index: int) -> float:
        return 1.0 if self.factors is None else self.factors[index]


#: A contribution to some pieces: its numbers, weight and factor.
_Part = tuple[torch.Tensor, float, float]


def tensor_of(array: Bytes, dtype: str) -> torch.Tensor:
    """A tensor over the bytes, without a copy. Do not write to it if the mapping is read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array).view(getattr(torch, dtype))


class SliceRules:
    """The rules of one slice: a torch optimizer per group, over this slice's pieces."""

    def __init__(self, segment: Segment, part: Slice, memory: Bytes, home: SliceStorage) -> None:
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
        #: The only group, if all pieces share one that is a torch optimizer.
        self._only_group = groups.pop() if len(groups) == 1 and self._specs[0].name not in PLAIN else None
        self._splits: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        #: Set while the slice is marked for a save: called once before the slice or its state changes.
        self.before_change: Callable[[bool], None] | None = None
        self._gathered: Gathered | None = None  # made by the first push that is held
        self._averages = Averages(self._parameters, [not assigns for assigns in self._assigns], home.decay)
        self._begin(self._make_optimizers())

    def about_to_change(self, waits: bool = True) -> None:
        """Under the slice's lock: lets a snapshot keep the old data. `waits`: it may wait for memory."""
        keep, self.before_change = self.before_change, None
        if keep is not None:
            keep(waits)

    def _begin(self, optimizers: dict[int, torch.optim.Optimizer]) -> None:
        """Uses these optimizers from now on, with fused kernels where they exist."""
        self._optimizers = optimizers
        self._overridden: frozenset[int] = frozenset()  # groups with overridden settings
        self._checked: set[int] = set()  # groups with a user's rule, after its first step
        self._bare_steps = {group: bare_step(optimizer) for group, optimizer in optimizers.items()}
        self._kernels = {
            group: FusedKernel(optimizer)
            for group, optimizer in optimizers.items()
            if self.segment.rules[group].name in FUSED and optimizer.defaults.get("fused")
        }

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Splits a slice-shaped tensor into pieces with the shapes of the parameters."""
        return [self.view(flat, k).view_as(parameter) for k, parameter in enumerate(self._parameters)]

    def _staged_pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Like `_split`, cached: staged bytes stay at the same address."""
        known = self._splits.get(id(flat))
        if known is None or known[0] is not flat:
            known = self._splits[id(flat)] = (flat, self._split(flat))
        return known[1]

    @property
    def num_views(self) -> int:
        """Staged tensors whose pieces are known."""
        return len(self._splits)

    def forget_staged(self) -> None:
        """Drops cached views: some gradient memory is gone."""
        self._splits.clear()

    # -- a round's gradient, as a backup gets it ----------------------------------------------------------

    def lay_down(self, gradients: Sequence[torch.Tensor | None], flat: torch.Tensor) -> list[int]:
        """Copies a round's gradient into slice-shaped host memory; returns the pieces it has."""
        has = [index for index, gradient in enumerate(gradients) if gradient is not None]
        for index in has:
            gradient, place = gradients[index], self.view(flat, index)
            assert gradient is not None
            if gradient.data_ptr() != place.data_ptr():  # else it was reduced in place
                place.copy_(gradient.reshape(-1))
        return has

    def as_pieces(self, flat: torch.Tensor, has: Sequence[int]) -> list[torch.Tensor | None]:
        """The gradient of each piece from slice-shaped memory, where rules can use it."""
        found: list[torch.Tensor | None] = [None] * len(self.pieces)
        if has:
            at_home = self.flat is self.host
            pieces = self._staged_pieces(flat) if at_home else self._split(self._home.bring(flat))
            for index in has:
                found[index] = pieces[index]
        return found

    def bytes_of_pieces(self, array: Bytes, has: Sequence[int]) -> list[memoryview]:
        """The byte ranges of these pieces in slice-shaped memory."""
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
        self,
        sources: Sequence[PushedSlice],
        round_weight: float,
        into: torch.Tensor | None = None,
        how: Aggregate | None = None,
        num_rows: int = 0,
    ) -> list[torch.Tensor | None]:
        """One gradient per piece: the mean or sum over the sources, or None if no source pushed it.

        The mean divides by the weight of the whole round; for `Assign`, by the weight of the sources that pushed.
        `into`: slice-shaped host memory for computed results, if needed. `how`: another way than the mean or sum,
        of `num_rows` workers: of those that have not pushed a piece, the gradient is 0.
        """
        place = into if self.flat is self.host else None
        if not self.pieces:
            return []
        if len(sources) == 1 and self._is_used_as_it_lies(sources[0], round_weight, how):
            return list(self._staged_pieces(sources[0].array))
        sources = [source._replace(array=self._home.bring(source.array)) for source in sources]
        is_even = all(source.factors is None or len(set(source.factors)) == 1 for source in sources)
        everywhere = is_even and all(all(source.has) for source in sources) and not any(self._assigns)
        if everywhere:
            parts = [(source.array, source.weight, source.factor(0)) for source in sources]
            return list(self._split(self._combine(parts, round_weight, into=place, how=how, num_rows=num_rows)))
        found: list[torch.Tensor | None] = []
        for index, assigns in enumerate(self._assigns):
            here = [
                (self.view(source.array, index), source.weight, 1.0 if assigns else source.factor(index))
                for source in sources
                if source.has[index]
            ]
            total = sum(weight for _, weight, _ in here) if assigns else round_weight
            start = self.pieces[index].offset // self._item_bytes
            combined = self._combine(here, total, start, assigns, place, how, num_rows) if here else None
            found.append(None if combined is None else combined.view_as(self._parameters[index]))
        return found

    def _is_used_as_it_lies(self, source: PushedSlice, total: float, how: Aggregate | None) -> bool:
        """Whether a single contribution can be used as the round's gradient without a copy."""
        is_here = source.array.device == self.flat.device and source.factors is None and how is None
        return is_here and (source.weight == total or self._reduce == "sum") and all(source.has)

    def _combine(
        self,
        sources: list[_Part],
        total: float,
        start: int = 0,
        mean: bool = False,
        into: torch.Tensor | None = None,
        how: Aggregate | None = None,
        num_rows: int = 0,
    ) -> torch.Tensor:
        """Σ wᵢfᵢgᵢ / Σ wᵢ, or Σ fᵢgᵢ, in the given order, with the factors f. `how`: another way, for gradients only.
        `mean`: of values that are assigned. A single full-weight source is not copied.
        """
        is_all = how is not None and how.needs_all and not mean
        averaged = mean or (self._reduce == "mean" and not (how is not None and how.is_sum))
        is_plain = all(factor == 1.0 for _, _, factor in sources)
        if len(sources) == 1 and is_plain and not is_all and (not averaged or sources[0][1] == total):
            return sources[0][0]
        size, weights = sources[0][0].numel(), [weight for _, weight, _ in sources]
        own = self.flat.dtype
        result = scratch(own, self.flat, start, size) if into is None else into[start : start + size]
        if is_all:
            assert how is not None
            rows = [array if factor == 1.0 else _scaled(array, factor) for array, _, factor in sources]
            missing = max(0, num_rows - len(rows))
            rows += [torch.zeros_like(rows[0])] * missing
            aggregate_tensors(how, rows, [*weights, *[0.0] * missing], result)
            return result
        wide = sum_dtype(self.part.dtype, averages=averaged) if averaged or not self._is_integer else self.part.dtype
        kind = getattr(torch, wide)
        total_of = result if kind == own else scratch(kind, self.flat, start, size)
        equal = is_plain and (not averaged or all(weight == weights[0] for weight in weights))
        factors = [(array, factor * (weight if averaged else 1.0)) for array, weight, factor in sources]
        weighted_sum(factors, total_of, weighted=not equal)
        if averaged:
            divide(total_of, total / weights[0] if equal else total)
        narrow(total_of, result)
        return result

    # -- applying -----------------------------------------------------------------------------------------

    def squared_norm(self, gradients: Sequence[torch.Tensor | None]) -> float:
        """The squared norm of the gradients of descending rules; `Add` and `Assign` do not count."""
        total = 0.0
        for gradient, spec in zip(gradients, self._specs, strict=True):
            if gradient is not None and spec.name not in PLAIN:
                total += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        return total

    def apply(
        self,
        gradients: Sequence[torch.Tensor | None],
        overrides: Overrides,
        scale: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Updates the pieces that have a gradient. `scale`: the factor on gradients. `weight`: how much the update
        counts; see `_step`.
        """
        if self.before_change is not None:
            self.about_to_change()
        if not self._averages.is_on:
            self._apply(gradients, overrides, scale, weight)
            return
        self._averages.begin()
        self._apply(gradients, overrides, scale, weight)
        self._averages.follow()

    def gather(
        self, gradients: Sequence[torch.Tensor | None], overrides: Overrides, scale: float, weight: float, group: int
    ) -> tuple[list[torch.Tensor | None], Overrides]:
        """Holds a push until its group is complete; returns the mean of the group then. See `Gathered.take`."""
        if self._gathered is None:
            self._gathered = self._new_gathered()
        return self._gathered.take(gradients, overrides, scale, weight, group)

    def _new_gathered(self) -> Gathered:
        return Gathered(self.segment, self.part, self._parameters, [spec.name for spec in self._specs])

    @property
    def num_gathered(self) -> int:
        """Pushes that are held."""
        return self._gathered.count if self._gathered is not None else 0

    def default_rate(self, group: int) -> float | None:
        """The learning rate that the rule of this group has without overrides; None: it has none."""
        optimizer = self._optimizers.get(group)
        return float(optimizer.defaults["lr"]) if optimizer is not None and "lr" in optimizer.defaults else None

    @property
    def groups(self) -> Sequence[int]:
        """The group of each piece."""
        return self._groups

    def _apply(
        self,
        gradients: Sequence[torch.Tensor | None],
        overrides: Overrides,
        scale: float,
        weight: float,
    ) -> None:
        given = [gradient for gradient in gradients if gradient is not None]
        if scale == 1.0 and self._only_group is not None and len(given) == len(self._parameters):
            pairs = list(zip(self._parameters, given, strict=True))
            self._step(self._only_group, pairs, overrides.get(self._only_group, {}), weight)
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
                parameter.add_(gradient if weight == 1.0 else _scaled(gradient, weight))
            elif spec.name == "Assign":
                parameter.copy_(gradient)
            else:
                stepping.setdefault(group, []).append((parameter, gradient * scale if scale != 1.0 else gradient))
        for group, pairs in stepping.items():
            self._step(group, pairs, overrides.get(group, {}), weight)
        self._home.publish(self.flat, self.host)

    def uploaded(self) -> None:
        """The initial values are here."""
        self._home.load(self.flat, self.host)

    def _step(
        self,
        group: int,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        override: Mapping[str, Option],
        weight: float = 1.0,
    ) -> None:
        """`weight` scales the gradients, or the step where the rule divides gradients by their size."""
        optimizer = self._optimizers[group]
        settings = optimizer.param_groups[0]
        if weight != 1.0 and (
            self.segment.rules[group].name in SCALES_WITH_GRADIENT or "lr" not in optimizer.defaults
        ):
            pairs = [(parameter, gradient * weight) for parameter, gradient in pairs]
        elif weight != 1.0:
            override = {**override, "lr": weight * float(override.get("lr", optimizer.defaults["lr"]))}
        if override or group in self._overridden:
            known = self.segment.rules[group].option_names
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
            if group not in self._checked and is_named(self.segment.rules[group].name):
                self._checked.add(group)
                self._check_own_state(group)
        finally:
            # A gradient may lie in a worker's arena: release it after use.
            for parameter, _ in pairs:
                parameter.grad = None

    def _check_own_state(self, group: int) -> None:
        """A user's rule has made its first step: its state must be one that can be saved and moved."""
        for index, parameter in enumerate(self._parameters):
            if self._groups[index] == group:
                for key, value in self._optimizers[group].state.get(parameter, {}).items():
                    if value is not None:
                        tensor = torch.as_tensor(value)
                        dtype = str(tensor.dtype).removeprefix("torch.")
                        self._check_state(StateEntry(self.part.id, index, key, dtype, tuple(tensor.shape)))

    # -- state --------------------------------------------------------------------------------------------

    def state(self, *, with_held: bool = False) -> list[tuple[StateEntry, torch.Tensor]]:
        """Everything the rules remember about this slice, tensor by tensor, in host memory; `with_held`: also the
        pushes that it holds.
        """
        held = self._gathered.entries() if with_held and self._gathered is not None else ()
        found = itertools.chain(self.live_state(), held)
        return [(entry, tensor.detach().contiguous().cpu()) for entry, tensor in found]

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

    def load_state(self, entries: Sequence[tuple[StateEntry, torch.Tensor]], *, with_held: bool = False) -> None:
        """Loads this state. Pieces that it does not name start afresh. `with_held`: also the pushes that are held;
        otherwise those here stay.
        """
        self.about_to_change()
        fresh: dict[int, dict[str, torch.Tensor]] = {}
        if with_held:
            gathered = self._new_gathered()
            entries = gathered.load(entries)
            self._gathered = gathered if gathered.count else None
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


def _scaled(numbers: torch.Tensor, factor: float) -> torch.Tensor:
    """The numbers times a factor; integers are rounded."""
    if numbers.is_floating_point():
        return numbers * factor
    return (numbers.to(torch.float64) * factor).round_().to(numbers.dtype)


@contextlib.contextmanager
def _unfused_where_it_cannot(
    optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """Disables fused SGD if only some parameters have a momentum: torch needs all or none."""
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
    """Whether torch has a correct fused kernel for this rule."""
    # Of SGD on halves on a CPU it is wrong (torch 2.13: off by a tenth of the update, from 16 items on).
    wrong = name == "SGD" and any(p.dtype in _HALF and p.device.type == "cpu" for p in parameters)
    return name in _FUSED and not wrong


def make_optimizer(spec: RuleSpec, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The torch optimizer of a rule, fused where torch has it; torch's own complaint becomes a RuleError."""
    kind: Any = own_optimizer(spec.name) if is_named(spec.name) else getattr(torch.optim, spec.name, None)
    if kind is None:
        raise RuleError(f"this torch ({torch.__version__}) has no {spec.name}")
    how = {"fused": True} if is_fused(spec.name, parameters) else {"foreach": False}
    if spec.name in _NO_FOREACH or is_named(spec.name):
        how = {}
    try:
        made: torch.optim.Optimizer = kind(parameters, **spec.options, **how)
    except (TypeError, ValueError) as error:
        raise RuleError(f"rule {spec.name}: {error}") from None
    return made


def own_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """A user's own optimizer, imported by name."""
    try:
        found = load(name)
    except ConfigError as error:
        raise RuleError(f"rule {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise RuleError(f"rule {name}: it is no torch.optim.Optimizer")
    return found


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], object]:
    """`step` without torch's hooks and profiling around it, which take longer than a small update itself."""
    is_own = not type(optimizer).__module__.startswith("torch.optim")  # its decorators are its own affair
    step: Callable[[torch.optim.Optimizer], object] = type(optimizer).step
    return step if is_own else inspect.unwrap(step)
