"""Reports, once, a worker whose hyperparameters differ from those that count in its rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from syncline.core.rounds import Commit
from syncline.core.rule import Option
from syncline.server.slices import HostedSlice
from syncline.server.tasks import Round, StagedCommit

#: Consecutive rounds before a report: a new learning rate may reach one worker a round before another.
NUM_ROUNDS = 3


class DroppedOptions:
    """Checks the rounds of one server under its lock; only the server of slice 0 does so."""

    def __init__(self, slices: Mapping[int, HostedSlice], *, counts_rates: bool = False) -> None:
        """`counts_rates`: every worker's own learning rate counts."""
        self._slices, self._counts_rates = slices, counts_rates
        self._num_rounds: dict[str, int] = {}  # consecutive rounds by worker
        self._told: set[str] = set()

    def see(self, commits: Round, leading: Commit[StagedCommit], say: Callable[[str], None]) -> None:
        """Checks a round whose hyperparameters are those of `leading`."""
        for commit in commits:
            item, name = commit.item, commit.worker
            if (
                item.overrides == leading.item.overrides
                or not item.pushed
                or self._differ_in_rates_only(item, leading)
            ):
                if self._num_rounds:
                    self._num_rounds.pop(name, None)
            elif name not in self._told:
                self._num_rounds[name] = self._num_rounds.get(name, 0) + 1
                if self._num_rounds[name] >= NUM_ROUNDS:
                    self._told.add(name)
                    say(self._sentence(name, item, leading))

    def _differ_in_rates_only(self, item: StagedCommit, leading: Commit[StagedCommit]) -> bool:
        return self._counts_rates and all(key == "lr" for key, _, _ in self._differing(item, leading.item))

    def _sentence(self, name: str, item: StagedCommit, leading: Commit[StagedCommit]) -> str:
        chief = leading.worker
        words = [f"{key} = {own} ({theirs} in {chief})" for key, own, theirs in self._differing(item, leading.item)]
        return (
            f"{name} has {', '.join(words)}, which does not count: in a round all gradients are applied with the "
            f"hyperparameters of {chief}; set the same in all workers, or use --policy async"
        )

    def _differing(
        self, item: StagedCommit, leading: StagedCommit
    ) -> Iterator[tuple[str, Option | None, Option | None]]:
        own = {(segment, group): options for segment, group, options in item.overrides}
        theirs = {(segment, group): options for segment, group, options in leading.overrides}
        seen = set()
        for where in sorted(own.keys() | theirs.keys()):
            for key in sorted(own.get(where, {}).keys() | theirs.get(where, {}).keys()):
                registered = self._registered(*where, key)
                pair = (own.get(where, {}).get(key, registered), theirs.get(where, {}).get(key, registered))
                if pair[0] != pair[1] and (key, *pair) not in seen:
                    seen.add((key, *pair))
                    yield key, *pair

    def _registered(self, segment: int, group: int, key: str) -> Option | None:
        found = next((slot.segment for slot in self._slices.values() if slot.part.segment == segment), None)
        return found.rules[group].options.get(key) if found is not None else None
