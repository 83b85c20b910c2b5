"""`job.kv`: keys and values on the servers, the framework-neutral face of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from syncline.client import arrays
from syncline.client.arrays import Array, Bytes
from syncline.client.exchange import Exchange, Push, Ticket
from syncline.client.sinks import ArraySink
from syncline.core.layout import Layout, Parameter, Segment, Slice, to_ranges
from syncline.core.messages import Message, Register, Registered, Uploaded
from syncline.core.rule import Rule
from syncline.errors import LayoutError, ProtocolError, RuleError

Rules = Rule | Mapping[str, Rule]
Named = Mapping[str, Array] | Iterable[tuple[str, Array]]


class Pulled(dict[str, Array]):
    """Parameters by name; after a pull, `versions` has the number of updates that each has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, int] = {}


class KvTicket:
    """A push under way; `wait` returns what it pulled, if it was to pull."""

    def __init__(self, ticket: Ticket, result: Callable[[], Pulled | None]) -> None:
        self._ticket, self._result = ticket, result

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self, timeout_seconds: float | None = None) -> Pulled | None:
        """Returns when the push is applied. Raises WaitTimeout, which names who is waited for."""
        self._ticket.wait(timeout_seconds)
        return self._result()


class KeyValue:
    """Parameters by name. Arrays are NumPy or torch CPU tensors; what was registered as torch comes back so."""

    def __init__(
        self,
        exchange: Exchange,
        ask: Callable[[Message], Message],
        who: str,
        stepped: Callable[[], None],
    ) -> None:
        self._exchange, self._ask, self._who, self._stepped = exchange, ask, who, stepped
        self._ordinal = 0
        self._as_torch: dict[str, bool] = {}

    @property
    def layout(self) -> Layout:
        return self._exchange.layout

    def register(self, params: Named, rule: Rules, reduce: str = "mean") -> Pulled:
        """Adds parameters to the job and returns their values there: the chief's.

        `rule` is one rule for all or a rule per name. In `sync`, a round's gradients are averaged by their
        weights (`reduce="mean"`) or added up (`"sum"`). Who is not the chief waits for the chief. Once a layout
        exists it wins; another one is an error; calling again adds parameters.
        """
        named = list(params.items() if isinstance(params, Mapping) else params)
        rules, parameters = self._describe(named, rule)
        for name, array in named:
            if (rule[name] if isinstance(rule, Mapping) else rule).name != "Assign":  # a mask may hold -inf
                arrays.check_finite(name, array, self._who)
        message = Register(self._ordinal, parameters, [r.spec for r in rules], reduce)
        answer = self._ask(message)
        self._ordinal += 1
        if not isinstance(answer, Registered):
            raise ProtocolError(f"a registration was answered with {type(answer).__name__}")
        values = dict(named)
        self._exchange.add(answer.segments)
        if answer.upload is not None:
            segment = self.layout.segments[answer.upload]
            self._exchange.upload(segment, self._flat(segment, values))
            self._ask(Uploaded(segment.index))
        for name, array in named:
            self._as_torch[name] = arrays.is_torch(array)
        return self.pull([name for name, _ in named])

    def _describe(self, named: Sequence[tuple[str, Array]], rule: Rules) -> tuple[list[Rule], list[Parameter]]:
        rules: list[Rule] = []
        parameters = []
        for name, array in named:
            chosen = rule.get(name) if isinstance(rule, Mapping) else rule
            if not isinstance(chosen, Rule):
                raise RuleError(f'{name!r} has no rule; give e.g. syncline.Rule("SGD", lr=0.1)')
            # By identity: two groups that begin with equal numbers may part later.
            if not any(known is chosen for known in rules):
                rules.append(chosen)
            group = next(number for number, known in enumerate(rules) if known is chosen)
            parameters.append(arrays.describe(name, array, group))
        return rules, parameters

    @staticmethod
    def _flat(segment: Segment, values: Mapping[str, Array]) -> Bytes:
        flat = np.zeros(segment.num_bytes, np.uint8)
        for parameter, offset in zip(segment.parameters, segment.offsets, strict=True):
            flat[offset : offset + parameter.num_bytes] = arrays.to_bytes(values[parameter.name])
        return flat

    # -- pushing ------------------------------------------------------------------------------------------

    def gradients(self, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Arrays inside the arena of the next push: filled in place, they are pushed without a copy.

        Ask again for every push when the job has a window; without one, the arrays stay the same.
        """
        return {name: self._in_arena(name) for name in self._known(names)}

    def _in_arena(self, name: str) -> Array:
        segment, index = self.layout.where[name]
        parameter, offset = segment.parameters[index], segment.offsets[index]
        data = self._exchange.arena(segment.index)[offset : offset + parameter.num_bytes]
        return arrays.from_bytes(data, parameter.dtype, parameter.shape, as_torch=self._as_torch.get(name, False))

    def _known(self, names: Iterable[str] | None) -> list[str]:
        if names is None:
            return list(self.layout.where)
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if name not in self.layout.where:
                known = ", ".join(list(self.layout.where)[:8])
                raise LayoutError(f"no parameter is named {name!r}; there are: {known or 'none yet'}")
        return wanted

    def _fill(self, grads: Mapping[str, Array]) -> Push:
        for name in self._known(grads):
            segment, index = self.layout.where[name]
            given = arrays.describe(name, grads[name])
            known = segment.parameters[index]
            same = (given.dtype, given.shape) == (known.dtype, known.shape)
            if not same and not (known.dtype == "bfloat16" and given.dtype == "uint16"):
                raise LayoutError(
                    f"{self._who} pushes {name!r} as {given.describe()}, the job has {known.describe()}"
                )
            target = self._in_arena(name)
            if known.num_items and arrays.address_of(grads[name]) != arrays.address_of(target):
                data = self._exchange.arena(segment.index)
                offset = segment.offsets[index]
                data[offset : offset + known.num_bytes] = arrays.to_bytes(grads[name])
        return Push(pushed=to_ranges(self.layout.parameter_id(name) for name in grads))

    def push(self, grads: Mapping[str, Array], weight: float = 1.0) -> KvTicket:
        """Sends gradients (any subset of names) and commits one clock."""
        push = self._weighed(self._fill(grads), weight)
        ticket = self._exchange.commit(push, None)
        self._stepped()
        return KvTicket(ticket, lambda: None)

    def push_pull(
        self, grads: Mapping[str, Array], out: Mapping[str, Array] | None = None, weight: float = 1.0
    ) -> KvTicket:
        """Sends gradients, commits, and brings back new parameters: those of `out`, or of the pushed names."""
        push = self._weighed(self._fill(grads), weight)
        result, targets, late = self._targets(list(grads) if out is None else list(out), out)
        ticket = self._exchange.commit(push, ArraySink(self.layout, targets))
        self._stepped()

        def finish() -> Pulled:
            self._fill_late(result, late)
            return result

        return KvTicket(ticket, finish)

    @staticmethod
    def _weighed(push: Push, weight: float) -> Push:
        if not (np.isfinite(weight) and weight >= 0):
            raise LayoutError(f"weight = {weight}: it must be a number from 0 on")
        return Push(pushed=push.pushed, weight=float(weight))

    # -- pulling ------------------------------------------------------------------------------------------

    def pull(
        self,
        names: Iterable[str] | None = None,
        out: Mapping[str, Array] | None = None,
        min_version: int | None = None,
    ) -> Pulled:
        """Parameters now, or as soon as they have seen `min_version` updates; into `out` where it is given."""
        wanted = self._known(out if names is None and out is not None else names)
        result, targets, late = self._targets(wanted, out)
        sink = ArraySink(self.layout, targets)
        slices = sink.slices()
        versions = self._exchange.pull(slices, sink, min_version)
        self._fill_late(result, late)
        result.versions = self._versions(wanted, slices, versions)
        return result

    def _targets(
        self, names: Sequence[str], out: Mapping[str, Array] | None
    ) -> tuple[Pulled, dict[str, Bytes], dict[str, Bytes]]:
        """Result arrays, the bytes to fill, and those bytes that must be copied on into strided arrays."""
        result, targets, late = Pulled(), dict[str, Bytes](), dict[str, Bytes]()
        for name in self._known(names):
            segment, index = self.layout.where[name]
            parameter = segment.parameters[index]
            if out is not None and name in out:
                given = arrays.describe(name, out[name])
                same = given.dtype == parameter.dtype or (given.dtype, parameter.dtype) == ("uint16", "bfloat16")
                if given.shape != parameter.shape or not same:
                    raise LayoutError(f"out[{name!r}] is {given.describe()}, the job has {parameter.describe()}")
                if not arrays.can_be_filled(out[name]):
                    raise LayoutError(f"out[{name!r}] is read-only; give an array that can be written")
                result[name] = out[name]
                own = arrays.writable_bytes(out[name])
                targets[name] = own if own is not None else np.empty(parameter.num_bytes, np.uint8)
                if own is None:
                    late[name] = targets[name]
            else:
                data = targets[name] = np.empty(parameter.num_bytes, np.uint8)
                as_torch = self._as_torch.get(name, False)
                result[name] = arrays.from_bytes(data, parameter.dtype, parameter.shape, as_torch=as_torch)
        return result, targets, late

    @staticmethod
    def _fill_late(result: Pulled, late: Mapping[str, Bytes]) -> None:
        for name, data in late.items():
            arrays.fill(result[name], data)

    def _versions(self, names: Sequence[str], slices: Sequence[Slice], found: Sequence[int]) -> dict[str, int]:
        """A parameter's version is that of its oldest slice."""
        versions: dict[str, int] = {}
        for part, version in zip(slices, found, strict=True):
            segment = self.layout.segments[part.segment]
            for piece in segment.pieces(part):
                name = segment.parameters[piece.parameter].name
                versions[name] = min(version, versions.get(name, version))
        return {name: versions.get(name, 0) for name in names}
