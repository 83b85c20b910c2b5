"""Registrations: the chief's define the layout; the others' are compared with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from syncline.core.layout import Layout, Parameter, Segment, arrange, place
from syncline.core.replica_sets import ReplicaSet
from syncline.core.rule import RuleSpec
from syncline.errors import LayoutError


@dataclasses.dataclass(frozen=True, slots=True)
class RegistrationDecision:
    """The decision on a registration, and why."""

    kind: Literal["known", "create", "wait"]
    reason: str
    segment: Segment | None = None


class Registry:
    """The job's layout as it grows, one segment per registration of the chief."""

    def __init__(self, servers: Sequence[str], slice_bytes: int) -> None:
        self.layout = Layout()
        self.ready: set[int] = set()  # segments with initial values on the servers
        self.replica_sets: dict[int, ReplicaSet] = {}
        self.servers, self._slice_bytes = list(servers), slice_bytes
        self.sizes: dict[int, int] = {}  # of slices

    def register(
        self,
        who: str,
        is_chief: bool,
        ordinal: int,
        parameters: Sequence[Parameter],
        rules: Sequence[RuleSpec],
        reduce: str,
    ) -> RegistrationDecision:
        """Known: continue. Create: a new segment. Wait: the chief has not registered this yet."""
        segment = arrange(
            parameters,
            [spec.rule() for spec in rules],
            reduce,
            index=len(self.layout.segments),
            ordinal=ordinal,
            first_parameter=self.layout.num_parameters,
        )
        if self.layout.knows_all(parameters):
            self.layout.check_same(parameters, who)
            self._check_complete(who, ordinal, parameters)
            self._check_rules(who, parameters, rules, reduce)
            if not self._are_ready(parameters):
                return RegistrationDecision("wait", "the chief's values are on their way")
            return RegistrationDecision("known", "registered already")
        if is_chief:
            self._check_new(parameters)
            return RegistrationDecision("create", "the chief's registration makes the layout", self._add(segment))
        if any(known.ordinal >= ordinal for known in self.layout.segments):
            self.layout.check_same(parameters, who)
        names = ", ".join(p.name for p in parameters[:3])
        return RegistrationDecision("wait", f"the chief has not registered {names} yet")

    def segments_with(self, parameters: Sequence[Parameter]) -> list[Segment]:
        """All segments up to the last one with any of these parameters; later ones may not be hosted yet."""
        last = max(self.layout.where[p.name][0].index for p in parameters)
        return self.layout.segments[: last + 1]

    def take_back(self, segment: Segment) -> None:
        """A segment could not be hosted, and no worker was told: undoes its registration."""
        if self.layout.segments and self.layout.segments[-1] is segment:
            for part in self.layout.drop_last().slices:
                del self.replica_sets[part.id], self.sizes[part.id]

    def _check_new(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            if parameter.name in self.layout.where:
                raise LayoutError(
                    f"{parameter.name!r} is registered already; register new parameters separately. Two "
                    "optimizers share all parameters or none; add_param_group adds parameters to an optimizer"
                )

    def _check_complete(self, who: str, ordinal: int, parameters: Sequence[Parameter]) -> None:
        for known in self.layout.segments:
            if known.ordinal == ordinal:
                self.layout.check_complete(known, parameters, who)

    def _check_rules(self, who: str, parameters: Sequence[Parameter], rules: Sequence[RuleSpec], reduce: str) -> None:
        """The numbers of a rule may differ, the rule may not: a push would mean something else."""
        for parameter in parameters:
            segment, index = self.layout.where[parameter.name]
            known, given = segment.rule_of(segment.parameters[index]).name, rules[parameter.group].name
            if (known, segment.reduce) != (given, reduce):
                raise LayoutError(
                    f"{who} registered {parameter.name!r} with {given} and reduce={reduce!r}, the job has {known} "
                    f"and reduce={segment.reduce!r}; a parameter has one rule in a job. Give the other "
                    "optimizer a copy of the model, or begin a new job: job.close(), then syncline.init()"
                )

    def _are_ready(self, parameters: Sequence[Parameter]) -> bool:
        return all(self.layout.where[p.name][0].index in self.ready for p in parameters)

    def _add(self, segment: Segment) -> Segment:
        loads = dict.fromkeys(self.servers, 0)
        for replica_set in self.replica_sets.values():
            if replica_set.primary in loads:
                loads[replica_set.primary] += self.sizes[replica_set.slice]
        placed, replica_sets = place(segment, self.servers, loads, self._slice_bytes, self.layout.num_slices)
        self.restore(placed, replica_sets)
        return placed

    def use_slices_of(self, num_bytes: int) -> None:
        """Sets the target size of slices."""
        self._slice_bytes = num_bytes

    def restore(self, segment: Segment, replica_sets: Iterable[ReplicaSet] = ()) -> None:
        """Adds a placed segment: a new one, or one from the journal."""
        self.layout.add(segment)
        self.sizes.update((part.id, part.num_bytes) for part in segment.slices)
        self.replica_sets.update((replica_set.slice, replica_set) for replica_set in replica_sets)
