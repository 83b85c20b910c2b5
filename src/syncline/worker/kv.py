"""`job.kv`: keys and values on the servers, the framework-neutral face of a job.

A caller gives the same arrays under the same names again and again: plans check and describe them once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from syncline.core.layout import Layout, Parameter, Ranges, Segment, Slice, to_ranges
from syncline.core.rule import PLAIN, Option, Rule, RuleSpec
from syncline.core.wire.control import Register, Registered, Uploaded
from syncline.core.wire.message import Message
from syncline.errors import ConfigError, LayoutError, ProtocolError, RuleError
from syncline.worker import arrays
from syncline.worker.arrays import Array, Bytes, copy
from syncline.worker.exchange.commit import Push, ServersTicket
from syncline.worker.exchange.finite import LOOK_BYTES, copy_finite
from syncline.worker.exchange.servers import ServersExchange
from syncline.worker.exchange.targets import ArrayTarget
from syncline.worker.exchange.values import KeptArrays
from syncline.worker.metrics import with_factor


class Given:
    """Arrays by name, recognized by identity, shape and data address.

    It does not keep them alive, so that a caller with new arrays for every push need not pay for the last ones.
    """

    def __init__(self, named: Mapping[str, Array]) -> None:
        self._items = [(name, _reference(array), array.shape, _place(array)) for name, array in named.items()]

    def is_again(self, named: Mapping[str, Array]) -> bool:
        if len(named) != len(self._items):
            return False
        for name, reference, shape, place in self._items:
            array = named.get(name)
            if reference() is not array or array is None or array.shape != shape or _place(array) != place:
                return False
        return True


def _reference(array: Array) -> Callable[[], Array | None]:
    try:
        return weakref.ref(array)
    except TypeError:  # a NumPy scalar
        return lambda: None


def _place(array: Array) -> Any:
    """NumPy cannot move the data of an array that others refer to; torch can."""
    return array.data_ptr() if hasattr(array, "data_ptr") else None


class PushPlan:
    """How arrays go into the arena of one slot: those that are not already there are copied."""

    def __init__(
        self, grads: Mapping[str, Array], pushed: Ranges, targets: Sequence[tuple[str, Bytes, str]], look: bool
    ) -> None:
        self._given = Given(grads)
        self._targets = targets
        self._push = Push(pushed=pushed)
        num_bytes = sum(target.size for _, target, _ in targets)
        self._looks = look and len(targets) == len(grads) and num_bytes >= LOOK_BYTES

    @property
    def pushed(self) -> Ranges:
        return self._push.pushed

    def fits(self, grads: Mapping[str, Array]) -> bool:
        return self._given.is_again(grads)

    def fill(self, grads: Mapping[str, Array]) -> bool:
        """Copies the arrays. Returns whether all were found finite while copying."""
        if self._looks:
            return copy_finite([(place, arrays.to_bytes(grads[name]), dtype) for name, place, dtype in self._targets])
        if self._targets:
            copy([(target, arrays.to_bytes(grads[name])) for name, target, _ in self._targets])
        return False

    def push(self, weight: float, is_finite: bool = False) -> Push:
        if weight == 1.0 and not is_finite:
            return self._push
        return Push(pushed=self._push.pushed, weight=weight, finite=self._push.pushed if is_finite else ())


class PullPlan:
    """Where pulled parameters go: the caller's arrays; strided ones are filled by a copy at the end.

    The arrays of the last pull are kept until the next one.
    """

    def __init__(
        self,
        out: Mapping[str, Array] | None,
        result: Mapping[str, Array],
        late: Mapping[str, Bytes],
        own: Mapping[str, Bytes],
        target: ArrayTarget,
    ) -> None:
        """`own`: the memory of results that were allocated for this pull."""
        self._given = Given(out) if out is not None else None
        self.result, self.late, self.own, self.target = result, late, own, target

    def fits(self, out: Mapping[str, Array] | None) -> bool:
        return out is not None and self._given is not None and self._given.is_again(out)

    def kept(self, layout: Layout) -> KeptArrays:
        """The memory allocated for this pull, for as long as the caller keeps the results."""
        return KeptArrays(layout, {name: weakref.ref(data) for name, data in self.own.items()})


Rules = Rule | Mapping[str, Rule]
Named = Mapping[str, Array] | Iterable[tuple[str, Array]]


class PulledValues(dict[str, Array]):
    """Parameters by name; after a pull, `versions` has the number of updates that each has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, int] = {}


class KvTicket:
    """A push in flight. `wait` returns the pulled parameters, if any."""

    def __init__(
        self, ticket: ServersTicket, result: Callable[[], PulledValues | None], leave_if_asked: Callable[[], None]
    ) -> None:
        self._ticket, self._result, self._leave_if_asked = ticket, result, leave_if_asked

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self, timeout_seconds: float | None = None) -> PulledValues | None:
        """Returns when the push is applied. Raises WaitTimeout, which names who is waited for."""
        self._ticket.wait(timeout_seconds)
        result = self._result()
        self._leave_if_asked()
        return result


class KeyValue:
    """Parameters by name. Arrays are NumPy or torch CPU tensors; what was registered as torch comes back so."""

    def __init__(
        self,
        exchange: ServersExchange,
        ask: Callable[[Message], Message],
        who: str,
        commits: Callable[[Hashable], None],
        stepped: Callable[[], None],
        leave_if_asked: Callable[[], None],
        lr_factor: Callable[[], float] = lambda: 1.0,
        notice_of_gradients: Callable[[], None] | None = None,
    ) -> None:
        """`commits` and `stepped` are called before and after each commit; `commits` gets a key that identifies
        the committer within a step. `leave_if_asked`: called between two steps. `lr_factor`: the factor on every
        rule's lr. `notice_of_gradients`: called when gradients are pushed, in a job with local steps.
        """
        self._exchange, self._ask, self._who = exchange, ask, who
        self._commits, self._stepped = commits, stepped
        self._leave_if_asked, self._lr_factor = leave_if_asked, lr_factor
        self._notice_of_gradients = notice_of_gradients
        self._ordinal = 0
        self._as_torch: dict[str, bool] = {}
        self._push_plans: dict[int, tuple[int, PushPlan]] = {}  # by slot, with the number of segments
        self._last_pull: tuple[int, PullPlan] | None = None
        self._changed: dict[tuple[int, int], dict[str, Option]] = {}  # by `set`: segment, group

    @property
    def layout(self) -> Layout:
        return self._exchange.layout

    def register(self, params: Named, rule: Rules, reduce: str = "mean") -> PulledValues:
        """Adds parameters to the job and returns their values there: the chief's.

        `rule` is one rule for all or a rule per name. In `sync`, a round's gradients are averaged by their
        weights (`reduce="mean"`) or added up (`"sum"`). Other workers wait for the chief. Once a layout
        exists it wins; another one is an error; calling again adds parameters.
        """
        named = list(params.items() if isinstance(params, Mapping) else params)
        self.declare(named, rule, reduce)
        return self.pull([name for name, _ in named])

    def declare(self, params: Named, rule: Rules, reduce: str = "mean") -> None:
        """As `register`, and leaves the values where they are: `pull` them into memory of your own."""
        self._leave_if_asked()
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
        self._exchange.add(answer.segments, answer.replica_sets)
        if answer.upload is not None:
            self._upload(self.layout.segments[answer.upload], dict(named))
        for name, array in named:
            self._as_torch[name] = arrays.is_torch(array)

    def _upload(self, segment: Segment, values: Mapping[str, Array]) -> None:
        """Uploads the chief's values; again if they were lost with a server."""
        data = {parameter.name: arrays.to_bytes(values[parameter.name]) for parameter in segment.parameters}
        answer: Message | None = None
        while answer is None or isinstance(answer, Registered):
            self._exchange.upload(segment, data)
            answer = self._ask(Uploaded(segment.index))

    def _describe(self, named: Sequence[tuple[str, Array]], rule: Rules) -> tuple[list[Rule], list[Parameter]]:
        rules: list[Rule] = []
        parameters = []
        for name, array in named:
            chosen = rule.get(name) if isinstance(rule, Mapping) else rule
            if not isinstance(chosen, Rule):
                raise RuleError(f'{name!r} has no rule; give e.g. syncline.Rule("SGD", lr=0.1)')
            # By identity: two groups with equal numbers may differ later.
            if not any(known is chosen for known in rules):
                rules.append(chosen)
            group = next(number for number, known in enumerate(rules) if known is chosen)
            parameters.append(arrays.describe(name, array, group))
        return rules, parameters

    # -- pushing ------------------------------------------------------------------------------------------

    def gradients(self, names: Iterable[str] | None = None) -> dict[str, Array]:
        """Arrays inside the arena of the next push: filled in place, they are pushed without a copy.

        From `push` until its `wait` has returned they must not be changed: servers read them there, and they are
        what is sent again when a server dies. A change meanwhile is not noticed. Ask again for every push when the
        job has a window; without one, the arrays stay the same.
        """
        return {name: self._in_arena(name) for name in self._known(names)}

    def _in_arena(self, name: str) -> Array:
        segment, index = self.layout.where[name]
        parameter, offset = segment.parameters[index], segment.offsets[index]
        self._exchange.is_arena_shared = True
        data = self._exchange.arena(segment.index)[offset : offset + parameter.num_bytes]
        return arrays.from_bytes(data, parameter.dtype, parameter.shape, as_torch=self._as_torch.get(name, False))

    def _known(self, names: Iterable[str] | None) -> list[str]:
        if names is None:
            return list(self.layout.where)
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if name not in self.layout.where:
                known = ", ".join(list(self.layout.where)[:8])
                raise LayoutError(f"no parameter is named {name!r}; choose from: {known or 'none yet'}")
        return wanted

    def _push_plan(self, grads: Mapping[str, Array]) -> PushPlan:
        slot, size = self._exchange.slot, len(self.layout.segments)
        known = self._push_plans.get(slot)
        if known is None or known[0] != size or not known[1].fits(grads):
            known = self._push_plans[slot] = (size, self._plan_push(grads))
        return known[1]

    def _plan_push(self, grads: Mapping[str, Array]) -> PushPlan:
        targets = []
        for name in self._known(grads):
            segment, index = self.layout.where[name]
            given = arrays.describe(name, grads[name])
            known = segment.parameters[index]
            same = (given.dtype, given.shape) == (known.dtype, known.shape)
            if not same and not (known.dtype == "bfloat16" and given.dtype == "uint16"):
                raise LayoutError(
                    f"{self._who} pushes {name!r} as {given.describe()}, the job has {known.describe()}"
                )
            if known.num_items and arrays.address_of(grads[name]) != arrays.address_of(self._in_arena(name)):
                offset = segment.offsets[index]
                place = self._exchange.arena(segment.index)[offset : offset + known.num_bytes]
                targets.append((name, place, known.dtype))
        pushed = to_ranges(self.layout.parameter_id(name) for name in grads)
        return PushPlan(grads, pushed, targets, self._exchange.checks_finite)

    def set(self, names: Iterable[str] | None = None, **options: object) -> None:
        """Changes hyperparameters of rules, from this worker's next push on: `kv.set(lr=0.05)`.

        Of all parameters that are registered so far and whose rule has these options, or of `names`. Parameters
        that were registered with the same rule object change together. In `sync` the chief's numbers count for all
        workers, as with an optimizer; otherwise each worker's own. They are not saved: a script that starts again
        calls this again.
        """
        if not options:
            raise ConfigError("kv.set() changes nothing; give an option, e.g. kv.set(lr=0.05)")
        groups = self._groups(names)
        known = {(index, group): self.layout.segments[index].rules[group] for index, group in groups}
        if names is None:
            known = {key: rule for key, rule in known.items() if options.keys() <= set(rule.option_names)}
            if not known:
                raise RuleError(f"kv.set({', '.join(options)}): no rule of this job has that; see syncline.Rule")
        changed = {}
        for key, rule in known.items():
            fresh = Rule(rule.name, **options).options  # or a RuleError
            changed[key] = {**self._changed.get(key, {}), **fresh}
        self._changed.update(changed)

    def _groups(self, names: Iterable[str] | None) -> list[tuple[int, int]]:
        """The rules of these parameters. All parameters of a rule must be named."""
        wanted = set(self._known(names))
        found: dict[tuple[int, int], list[str]] = {}
        for name, (segment, index) in self.layout.where.items():
            found.setdefault((segment.index, segment.parameters[index].group), []).append(name)
        chosen = {key: each for key, each in found.items() if not wanted.isdisjoint(each)}
        for each in chosen.values():
            if missing := [name for name in each if name not in wanted]:
                given = next(name for name in each if name in wanted)
                raise RuleError(
                    f"kv.set: {given!r} and {missing[0]!r} were registered with the same rule and change together; "
                    "name all of them, or register each with a Rule object of its own"
                )
        return list(chosen)

    def push(self, grads: Mapping[str, Array], weight: float = 1.0, **options: object) -> KvTicket:
        """Sends gradients (any subset of names) and commits one clock.

        It sends a copy: the arrays may be changed when this returns, unless they are those of `gradients`.
        Hyperparameters are the rule's: `set` changes them.
        """
        _refuse(options)
        self._leave_if_asked()
        return KvTicket(self._commit(grads, weight, None), lambda: None, self._leave_if_asked)

    def push_pull(
        self,
        grads: Mapping[str, Array],
        out: Mapping[str, Array] | None = None,
        weight: float = 1.0,
        **options: object,
    ) -> KvTicket:
        """Sends gradients, commits, and brings back new parameters: those of `out`, or of the pushed names.

        `out` is written until `wait` has returned; the gradients are sent as by `push`.
        """
        _refuse(options)
        self._leave_if_asked()
        plan = self._pull_plan(list(grads) if out is None else list(out), out)
        result = functools.partial(self._finish, plan)
        return KvTicket(self._commit(grads, weight, plan.target), result, self._leave_if_asked)

    def _commit(self, grads: Mapping[str, Array], weight: float, target: ArrayTarget | None) -> ServersTicket:
        if not (math.isfinite(weight) and weight >= 0):
            raise LayoutError(f"weight = {weight}: it must be a number from 0 on")
        self._exchange.times.lap("compute")
        self._exchange.make_room()
        plan = self._push_plan(grads)
        if self._notice_of_gradients is not None and any(self._rule_of(name).name not in PLAIN for name in grads):
            self._notice_of_gradients()
        self._commits(plan.pushed)
        push = plan.push(float(weight), plan.fill(grads))
        if (factor := self._lr_factor()) != 1.0 or self._changed:
            push = dataclasses.replace(push, overrides=self._overrides(factor))
        ticket = self._exchange.commit(push, target)
        self._stepped()
        return ticket

    def _rule_of(self, name: str) -> RuleSpec:
        segment, index = self.layout.where[name]
        return segment.rule_of(segment.parameters[index])

    def _overrides(self, factor: float) -> list[tuple[int, int, Mapping[str, Option]]]:
        found = []
        for segment in self.layout.segments:
            for group, rule in enumerate(segment.rules):
                changed = self._changed.get((segment.index, group), {})
                if options := with_factor(changed, rule.options, factor):
                    found.append((segment.index, group, options))
        return found

    def _finish(self, plan: PullPlan) -> PulledValues:
        for name, data in plan.late.items():
            arrays.fill(plan.result[name], data)
        if plan.own:  # the target is temporary, these arrays stay
            self._exchange.keep(plan.target, plan.target.slices(), plan.kept(self.layout))
        result = PulledValues()
        result.update(plan.result)
        return result

    # -- pulling ------------------------------------------------------------------------------------------

    def pull(
        self,
        names: Iterable[str] | None = None,
        out: Mapping[str, Array] | None = None,
        min_version: int | None = None,
    ) -> PulledValues:
        """Parameters now, or as soon as they have seen `min_version` updates; into `out` where it is given."""
        self._leave_if_asked()
        wanted = self._known(out if names is None and out is not None else names)
        plan = self._pull_plan(wanted, out) if names is None else self._plan_pull(wanted, out)
        slices = plan.target.slices()
        versions = self._exchange.pull(slices, plan.target, min_version)
        result = self._finish(plan)
        result.versions = self._versions(wanted, slices, versions)
        return result

    def _pull_plan(self, names: Sequence[str], out: Mapping[str, Array] | None) -> PullPlan:
        size = len(self.layout.segments)
        if self._last_pull is not None and self._last_pull[0] == size and self._last_pull[1].fits(out):
            return self._last_pull[1]
        plan = self._plan_pull(names, out)
        self._last_pull = (size, plan) if out is not None else None
        return plan

    def _plan_pull(self, names: Sequence[str], out: Mapping[str, Array] | None) -> PullPlan:
        """The result arrays, the bytes to fill, and the bytes to copy into strided arrays afterwards."""
        result, targets, late = dict[str, Array](), dict[str, Bytes](), dict[str, Bytes]()
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
        target = ArrayTarget(self.layout, targets)
        made = {name: data for name, data in targets.items() if out is None or name not in out}
        if len(made) < len(targets):
            self._exchange.overwrites(target)
        return PullPlan(out, result, late, made, target)

    def _versions(self, names: Sequence[str], slices: Sequence[Slice], found: Sequence[int]) -> dict[str, int]:
        """A parameter's version is that of its oldest slice."""
        versions: dict[str, int] = {}
        for part, version in zip(slices, found, strict=True):
            segment = self.layout.segments[part.segment]
            for piece in segment.pieces(part):
                name = segment.parameters[piece.parameter].name
                versions[name] = min(version, versions.get(name, version))
        return {name: versions.get(name, 0) for name in names}


def _refuse(options: Mapping[str, object]) -> None:
    for key in options:
        raise ConfigError(
            f"a push takes no {key}: it is the rule's; kv.set({key}=…) changes it from the next push on"
        )
