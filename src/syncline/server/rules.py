"""The rules of a slice: the gradients of a round become one, and change the parameters."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from syncline.core.aggregate import Aggregate
from syncline.core.layout import INTEGERS, ITEM_BYTES, Segment, Slice
from syncline.core.rule import PLAIN, SCALES_WITH_GRADIENT, Option, RuleSpec, check_state
from syncline.core.wire.traffic import StateEntry
from syncline.errors import ProtocolError
from syncline.extensions import is_named
from syncline.net.transport import buffer_of
from syncline.reduce.kernels import Numbers, divide, narrow, sum_dtype, weighted_sum
from syncline.server import numbers as of
from syncline.server.aggregation import aggregate_numbers
from syncline.server.averages import Averages
from syncline.server.gather import Gathered, Overrides
from syncline.server.numbers import Bytes
from syncline.server.numpy_rules import NumpyRule
from syncline.server.storage import SliceStorage

_local = threading.local()
_MOST_KEPT = 1024


def scratch(dtype: str, flat: Numbers, start: int, num_items: int) -> Numbers:
    """Scratch memory of this thread for a slice or a part of it. The same part gets the same memory."""
    kept: dict[object, Numbers] = _local.__dict__.setdefault("kept", {})
    kind = (dtype, getattr(flat, "device", None))
    key = (kind, start, num_items)
    if key not in kept:
        if len(kept) > _MOST_KEPT:
            kept.clear()
        size = of.number_of_items(flat)
        if kind not in kept or of.number_of_items(kept[kind]) < size:
            for old in [known for known in kept if known == kind or known[0] == kind]:  # type: ignore[index]
                del kept[old]
            kept[kind] = of.empty(size, dtype, flat)
        kept[key] = kept[kind][start : start + num_items]
    return kept[key]


class GroupRule(Protocol):
    """The rule of one group of a slice, and what it remembers of the group's pieces."""

    @property
    def defaults(self) -> Mapping[str, Any]: ...

    def step(self, gradients: Mapping[int, Numbers], override: Mapping[str, Option]) -> None:
        """Updates the pieces that have a gradient."""

    def state(self, index: int) -> dict[str, Numbers]: ...

    def load(self, states: Mapping[int, dict[str, Numbers]]) -> None: ...


def make_rule(spec: RuleSpec, parameters: Mapping[int, Numbers]) -> GroupRule:
    """A rule over these pieces: by torch, or by NumPy in a process that does without it."""
    if not of.uses_torch():
        return NumpyRule(spec, parameters)
    from syncline.server.torch_rules import TorchRule  # imports torch

    return TorchRule(spec, parameters)


class PushedSlice(NamedTuple):
    """One contribution to a slice: its bytes, weight and pieces, and the factor on the gradient of each piece."""

    array: Numbers
    weight: float
    has: Sequence[bool]
    factors: Sequence[float] | None = None  # None: 1

    def factor(self, index: int) -> float:
        return 1.0 if self.factors is None else self.factors[index]


#: A contribution to some pieces: its numbers, weight and factor.
_Part = tuple[Numbers, float, float]


class SliceRules:
    """The rules of one slice, one for each group of its pieces."""

    def __init__(self, segment: Segment, part: Slice, memory: Bytes, storage: SliceStorage) -> None:
        self.segment, self.part = segment, part
        self.pieces = segment.pieces(part)
        of.choose_kind({segment.rule_of(segment.parameters[piece.parameter]).name for piece in self.pieces})
        self._storage, self.host = storage, of.numbers_in(memory, part.dtype)
        self.flat = storage.numbers(self.host, part)
        self._item_bytes = ITEM_BYTES[part.dtype]
        self._reduce, self._is_integer = segment.reduce, part.dtype in INTEGERS
        self._specs = [segment.rule_of(segment.parameters[piece.parameter]) for piece in self.pieces]
        self._groups = [segment.parameters[piece.parameter].group for piece in self.pieces]
        self._assigns = [spec.name == "Assign" for spec in self._specs]
        self._parameters = [self._parameter(index) for index in range(len(self.pieces))]
        groups = set(self._groups)
        #: The only group, if all pieces share one that descends along gradients.
        self._only_group = groups.pop() if len(groups) == 1 and self._specs[0].name not in PLAIN else None
        self._splits: dict[int, tuple[Numbers, list[Numbers]]] = {}
        #: Whether the slice is marked, for a save or a cut. Each `keep` is called before it or its state changes.
        self.is_marked = False
        self._keeps: list[Callable[[bool], None]] = []
        self._gathered: Gathered | None = None  # made by the first push that is held
        self._averages = Averages(self._parameters, [not assigns for assigns in self._assigns], storage.decay)
        self._begin(self._make_rules())

    def mark(self, keep: Callable[[bool], None]) -> None:
        """Under the slice's lock: calls `keep` once, before the slice or its state changes."""
        self._keeps.append(keep)
        self.is_marked = True

    def unmark(self, keep: Callable[[bool], None]) -> None:
        """Under the slice's lock: `keep` is no longer called."""
        self._keeps = [other for other in self._keeps if other != keep]
        self.is_marked = bool(self._keeps)

    def about_to_change(self, waits: bool = True) -> None:
        """Under the slice's lock: lets snapshots keep the old data. `waits`: they may wait for memory."""
        keeps, self._keeps, self.is_marked = self._keeps, [], False
        for keep in keeps:
            keep(waits)

    def _split(self, flat: Numbers) -> list[Numbers]:
        """Splits a slice-shaped tensor into pieces with the shapes of the parameters."""
        return [self.view(flat, k).reshape(parameter.shape) for k, parameter in enumerate(self._parameters)]

    def _staged_pieces(self, flat: Numbers) -> list[Numbers]:
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

    def lay_down(self, gradients: Sequence[Numbers | None], flat: Numbers) -> list[int]:
        """Copies a round's gradient into slice-shaped host memory; returns the pieces it has."""
        has = [index for index, gradient in enumerate(gradients) if gradient is not None]
        for index in has:
            gradient, place = gradients[index], self.view(flat, index)
            assert gradient is not None
            if of.address_of(gradient) != of.address_of(place):  # else it was reduced in place
                of.copy_into(place, gradient.reshape(-1))
        return has

    def as_pieces(self, flat: Numbers, has: Sequence[int]) -> list[Numbers | None]:
        """The gradient of each piece from slice-shaped memory, where rules can use it."""
        found: list[Numbers | None] = [None] * len(self.pieces)
        if has:
            in_place = self.flat is self.host
            pieces = self._staged_pieces(flat) if in_place else self._split(self._storage.bring(flat))
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

    def view(self, flat: Numbers, index: int) -> Numbers:
        """One piece of a slice-shaped tensor."""
        piece = self.pieces[index]
        start = piece.offset // self._item_bytes
        return flat[start : start + piece.num_items]

    def _parameter(self, index: int) -> Numbers:
        view = self.view(self.flat, index)
        if self._specs[index].elementwise:
            return view
        return view.reshape(self.segment.parameters[self.pieces[index].parameter].shape)

    def _begin(self, rules: dict[int, GroupRule]) -> None:
        self._rules = rules
        #: Groups with a user's rule that has made no step yet.
        self._unchecked = {group for group in rules if is_named(self.segment.rules[group].name)}

    def _make_rules(self) -> dict[int, GroupRule]:
        members: dict[int, dict[int, Numbers]] = {}
        for index, group in enumerate(self._groups):
            if self._specs[index].name not in PLAIN:
                members.setdefault(group, {})[index] = self._parameters[index]
        return {group: make_rule(self.segment.rules[group], pieces) for group, pieces in members.items()}

    # -- a round's gradients become one -------------------------------------------------------------------

    def reduced(
        self,
        sources: Sequence[PushedSlice],
        round_weight: float,
        into: Numbers | None = None,
        how: Aggregate | None = None,
        num_rows: int = 0,
    ) -> list[Numbers | None]:
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
        sources = [source._replace(array=self._storage.bring(source.array)) for source in sources]
        is_even = all(source.factors is None or len(set(source.factors)) == 1 for source in sources)
        everywhere = is_even and all(all(source.has) for source in sources) and not any(self._assigns)
        if everywhere:
            parts = [(source.array, source.weight, source.factor(0)) for source in sources]
            return list(self._split(self._combine(parts, round_weight, into=place, how=how, num_rows=num_rows)))
        found: list[Numbers | None] = []
        for index, assigns in enumerate(self._assigns):
            here = [
                (self.view(source.array, index), source.weight, 1.0 if assigns else source.factor(index))
                for source in sources
                if source.has[index]
            ]
            total = sum(weight for _, weight, _ in here) if assigns else round_weight
            start = self.pieces[index].offset // self._item_bytes
            combined = self._combine(here, total, start, assigns, place, how, num_rows) if here else None
            found.append(None if combined is None else combined.reshape(self._parameters[index].shape))
        return found

    def _is_used_as_it_lies(self, source: PushedSlice, total: float, how: Aggregate | None) -> bool:
        """Whether a single contribution can be used as the round's gradient without a copy."""
        is_here = of.is_beside(source.array, self.flat) and source.factors is None and how is None
        return is_here and (source.weight == total or self._reduce == "sum") and all(source.has)

    def _combine(
        self,
        sources: list[_Part],
        total: float,
        start: int = 0,
        mean: bool = False,
        into: Numbers | None = None,
        how: Aggregate | None = None,
        num_rows: int = 0,
    ) -> Numbers:
        """Σ wᵢfᵢgᵢ / Σ wᵢ, or Σ fᵢgᵢ, in the given order, with the factors f. `how`: another way, for gradients only.
        `mean`: of values that are assigned. A single full-weight source is not copied.
        """
        is_all = how is not None and how.needs_all and not mean
        averaged = mean or (self._reduce == "mean" and not (how is not None and how.is_sum))
        is_plain = all(factor == 1.0 for _, _, factor in sources)
        if len(sources) == 1 and is_plain and not is_all and (not averaged or sources[0][1] == total):
            return sources[0][0]
        size, weights = of.number_of_items(sources[0][0]), [weight for _, weight, _ in sources]
        own = self.part.dtype
        result = scratch(own, self.flat, start, size) if into is None else into[start : start + size]
        if is_all:
            assert how is not None
            rows = [array if factor == 1.0 else of.scaled(array, factor) for array, _, factor in sources]
            missing = max(0, num_rows - len(rows))
            rows += [of.zeros(rows[0].shape, own, rows[0])] * missing
            aggregate_numbers(how, rows, [*weights, *[0.0] * missing], result)
            return result
        wide = sum_dtype(self.part.dtype, averages=averaged) if averaged or not self._is_integer else self.part.dtype
        total_of = result if wide == own else scratch(wide, self.flat, start, size)
        equal = is_plain and (not averaged or all(weight == weights[0] for weight in weights))
        factors = [(array, factor * (weight if averaged else 1.0)) for array, weight, factor in sources]
        weighted_sum(factors, total_of, weighted=not equal)
        if averaged:
            divide(total_of, total / weights[0] if equal else total)
        narrow(total_of, result)
        return result

    # -- applying -----------------------------------------------------------------------------------------

    def squared_norm(self, gradients: Sequence[Numbers | None]) -> float:
        """The squared norm of the gradients of descending rules; `Add` and `Assign` do not count."""
        total = 0.0
        for gradient, spec in zip(gradients, self._specs, strict=True):
            if gradient is not None and spec.name not in PLAIN:
                total += of.squared_norm(gradient)
        return total

    def apply(
        self,
        gradients: Sequence[Numbers | None],
        overrides: Overrides,
        scale: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Updates the pieces that have a gradient. `scale`: the factor on gradients. `weight`: how much the update
        counts; see `_step`.
        """
        if self.is_marked:
            self.about_to_change()
        if not self._averages.is_on:
            self._apply(gradients, overrides, scale, weight)
            return
        self._averages.begin()
        self._apply(gradients, overrides, scale, weight)
        self._averages.follow()

    def gather(
        self, gradients: Sequence[Numbers | None], overrides: Overrides, scale: float, weight: float, group: int
    ) -> tuple[list[Numbers | None], Overrides]:
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
        rule = self._rules.get(group)
        return float(rule.defaults["lr"]) if rule is not None and "lr" in rule.defaults else None

    @property
    def groups(self) -> Sequence[int]:
        """The group of each piece."""
        return self._groups

    def _apply(
        self,
        gradients: Sequence[Numbers | None],
        overrides: Overrides,
        scale: float,
        weight: float,
    ) -> None:
        given = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        if scale == 1.0 and self._only_group is not None and len(given) == len(self._parameters):
            self._step(self._only_group, given, overrides.get(self._only_group, {}), weight)
            self._storage.publish(self.flat, self.host)
            return
        stepping: dict[int, dict[int, Numbers]] = {}
        for index, gradient in given.items():
            parameter, name = self._parameters[index], self._specs[index].name
            if gradient.shape != parameter.shape:
                gradient = gradient.reshape(parameter.shape)
            if name == "Add":
                of.add_to(parameter, gradient if weight == 1.0 else of.scaled(gradient, weight))
            elif name == "Assign":
                of.copy_into(parameter, gradient)
            else:
                gradient = of.scaled(gradient, scale) if scale != 1.0 else gradient
                stepping.setdefault(self._groups[index], {})[index] = gradient
        for group, own in stepping.items():
            self._step(group, own, overrides.get(group, {}), weight)
        self._storage.publish(self.flat, self.host)

    def uploaded(self) -> None:
        """The initial values are here."""
        self._storage.load(self.flat, self.host)

    def _step(
        self, group: int, gradients: Mapping[int, Numbers], override: Mapping[str, Option], weight: float = 1.0
    ) -> None:
        """`weight` scales the gradients, or the step where the rule divides gradients by their size."""
        rule, name = self._rules[group], self.segment.rules[group].name
        if weight != 1.0 and (name in SCALES_WITH_GRADIENT or "lr" not in rule.defaults):
            gradients = {index: of.scaled(gradient, weight) for index, gradient in gradients.items()}
        elif weight != 1.0:
            override = {**override, "lr": weight * float(override.get("lr", rule.defaults["lr"]))}
        rule.step(gradients, override)
        if group in self._unchecked:
            self._unchecked.remove(group)
            self._check_own_state(group)

    def _check_own_state(self, group: int) -> None:
        """A user's rule has made its first step: its state must be one that can be saved and moved."""
        for index in range(len(self._parameters)):
            if self._groups[index] == group:
                for entry, _ in self._state_of(index):
                    self._check_state(entry)

    # -- state --------------------------------------------------------------------------------------------

    def state(self, *, with_held: bool = False) -> list[tuple[StateEntry, Numbers]]:
        """Everything the rules remember about this slice, tensor by tensor, in host memory; `with_held`: also the
        pushes that it holds.
        """
        held = self._gathered.entries() if with_held and self._gathered is not None else ()
        found = itertools.chain(self.live_state(), held)
        return [(entry, of.on_host(numbers)) for entry, numbers in found]

    def live_state(self) -> Iterator[tuple[StateEntry, Numbers]]:
        """The same where it lies."""
        self._storage.settle()
        for index in range(len(self._parameters)):
            yield from self._state_of(index)
            yield from self._averages.entries(self.part.id, index)

    def _state_of(self, index: int) -> Iterator[tuple[StateEntry, Numbers]]:
        rule = self._rules.get(self._groups[index])
        for key, numbers in rule.state(index).items() if rule is not None else ():
            yield StateEntry(self.part.id, index, key, of.dtype_of(numbers), tuple(numbers.shape)), numbers

    def load_state(self, entries: Sequence[tuple[StateEntry, Numbers]], *, with_held: bool = False) -> None:
        """Loads this state. Pieces that it does not name start afresh. `with_held`: also the pushes that are held;
        otherwise those here stay.
        """
        self.about_to_change()
        fresh: dict[int, dict[int, dict[str, Numbers]]] = {}  # by group and piece
        if with_held:
            gathered = self._new_gathered()
            entries = gathered.load(entries)
            self._gathered = gathered if gathered.count else None
        for entry, numbers in self._averages.load(entries):
            if not 0 <= entry.piece < len(self.pieces):
                raise ProtocolError(f"state for piece {entry.piece} of slice {self.part.id}")
            self._check_state(entry)
            of_group = fresh.setdefault(self._groups[entry.piece], {})
            of_group.setdefault(entry.piece, {})[entry.key] = of.copy_of(numbers, self.flat)
        rules = self._make_rules()
        for group, states in fresh.items():
            rules[group].load(states)
        self._begin(rules)

    def _check_state(self, entry: StateEntry) -> None:
        spec = (self.part.dtype, tuple(self._parameters[entry.piece].shape))
        check_state(self._specs[entry.piece].name, entry.key, entry.dtype, entry.shape, spec)
