"""Reports, once, a worker whose hyperparameters differ from those that count in its rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from syncline.core.rounds import Commit
from syncline.core.rule import Option
from syncline.server.slices import HostedSlice
from syncline.server.tasks import Round, StagedCommit

Options = list[tuple[int, int, dict[str, Option]]]

#: Consecutive rounds before a report, of a worker that differs from its first round on.
NUM_ROUNDS = 3

#: The same of a worker that agreed before: a schedule may reach a milestone some steps earlier in one worker than in
#: another, and a restarted worker may be some steps behind.
NUM_ROUNDS_OF_SCHEDULES = 50

#: A value that changes with every step is reported only if it is further away than this share of its size.
SCHEDULE_SHARE = 0.5


class DroppedOptions:
    """Checks the rounds of one server under its lock; only the server of slice 0 does so."""

    def __init__(self, slices: Mapping[int, HostedSlice], *, counts_rates: bool = False) -> None:
        """`counts_rates`: every worker's own learning rate counts."""
        self._slices, self._counts_rates = slices, counts_rates
        self._num_rounds: dict[str, int] = {}  # consecutive rounds by worker
        self._last: dict[str, tuple[Options, Options]] = {}  # by worker: its options, the leader's
        self._agreed: set[str] = set()  # workers that had the leader's options in some round
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
                self._agreed.add(name)
                if self._num_rounds:
                    self._num_rounds.pop(name, None)
                    self._last.pop(name, None)
            elif name not in self._told:
                self._num_rounds[name] = self._num_rounds.get(name, 0) + 1 if self._counts(name, item, leading) else 0
                if self._num_rounds[name] >= (NUM_ROUNDS_OF_SCHEDULES if name in self._agreed else NUM_ROUNDS):
                    self._told.add(name)
                    say(self._sentence(name, item, leading))

    def _differ_in_rates_only(self, item: StagedCommit, leading: Commit[StagedCommit]) -> bool:
        return self._counts_rates and all(key == "lr" for key, *_ in self._differing(item, leading.item))

    def _counts(self, name: str, item: StagedCommit, leading: Commit[StagedCommit]) -> bool:
        """Whether the difference is worth a report: values that stay as they are, or that are far from each other."""
        now = (item.overrides, leading.item.overrides)
        before, self._last[name] = self._last.get(name, now), now
        return before == now or any(_is_far(*pair) for _, *pair in self._differing(item, leading.item))

    def _sentence(self, name: str, item: StagedCommit, leading: Commit[StagedCommit]) -> str:
        chief = leading.worker
        differing = self._differing(item, leading.item)
        words = [f"{key} = {own} ({theirs} in {chief})" for key, own, theirs, _ in differing]
        return (
            f"{name} has {', '.join(words)}, which has no effect: a round uses the hyperparameters of {chief}; set "
            f"the same in all workers (a restarted worker: keep its scheduler in job.state), or use --policy async"
        )

    def _differing(
        self, item: StagedCommit, leading: StagedCommit
    ) -> Iterator[tuple[str, Option | None, Option | None, Option | None]]:
        """Name, own value, the leader's value and the registered value of each option that differs."""
        own = {(segment, group): options for segment, group, options in item.overrides}
        theirs = {(segment, group): options for segment, group, options in leading.overrides}
        seen: set[tuple[str, Option | None, Option | None]] = set()
        for where in sorted(own.keys() | theirs.keys()):
            for key in sorted(own.get(where, {}).keys() | theirs.get(where, {}).keys()):
                registered = self._registered(*where, key)
                pair = (own.get(where, {}).get(key, registered), theirs.get(where, {}).get(key, registered))
                if pair[0] != pair[1] and (key, *pair) not in seen:
                    seen.add((key, *pair))
                    yield key, *pair, registered

    def _registered(self, segment: int, group: int, key: str) -> Option | None:
        found = next((slot.segment for slot in self._slices.values() if slot.part.segment == segment), None)
        return found.rules[group].options.get(key) if found is not None else None


def _is_far(own: Option | None, theirs: Option | None, registered: Option | None) -> bool:
    """Whether a schedule does not explain the difference. Values near 0 are compared with the registered one."""
    if not isinstance(own, int | float) or not isinstance(theirs, int | float):
        return True
    size = max(abs(own), abs(theirs), abs(registered) if isinstance(registered, int | float) else 0.0)
    return abs(own - theirs) > SCHEDULE_SHARE * size
