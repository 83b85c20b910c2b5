"""What must hold after every event, as somebody sees it who can look into every process."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from syncline.core.policy import Policy

from .samples import Entry, Sample, Samples
from .world import Violation, World

if TYPE_CHECKING:
    from .hosting import Host, Hosted

Identity = tuple[str, int]


class Ledger:
    """The one-hot ledger: which step of whom is in which slice, and who was told so."""

    def __init__(
        self, world: World, num_slices: int, policy: Policy, *, is_even: bool, epochs: int = 0, num_samples: int = 0
    ) -> None:
        self.world, self.num_slices, self.policy, self.is_even = world, num_slices, policy, is_even
        self.sent: dict[Entry, float] = {}
        self.acknowledged: dict[Entry, float] = {}
        self.epochs = dict.fromkeys(range(num_slices), 0)  # of each slice: how often it came back from a copy
        self.revoked: dict[int, float] = {}  # slices of which updates were reported as revoked, and when
        self.doubles: set[Identity] = set()  # workers reported as lost together with a server
        self.server_losses: list[float] = []
        self.reports: list[str] = []
        self._digests: dict[tuple[int, int, int], int] = {}
        self._offices: dict[
            int, tuple[int, int, str]
        ] = {}  # slice: epoch, generation, who applied last as its primary
        self._rounds: dict[Entry, frozenset[Entry]] = {}
        self._is_late: dict[Entry, bool] = {}
        self._order: dict[Entry, int] = {}  # of rounds: the first of whose steps was when
        self._seen: dict[tuple[str, int], tuple[int, int]] = {}
        self.fenced: set[Identity] = set()  # and settled, on every server
        self.samples = Samples(self.fail, epochs, num_samples)

    def fail(self, text: str) -> None:
        raise Violation(f"seed {self.world.seed} at {self.world.now:.4f}: {text}")

    # -- events -------------------------------------------------------------------------------------------

    def step_sent(self, entry: Entry, samples: tuple[Sample, ...] = ()) -> None:
        self.sent.setdefault(entry, self.world.now)
        self.samples.step_sent(entry, samples)

    def decided(self, entry: Entry, is_late: bool) -> None:
        """With spare workers: the clock of a late step advances, and nothing of it counts; on every slice alike."""
        if is_late:
            self.samples.late.add(entry)
        if self._is_late.setdefault(entry, is_late) == is_late:
            return
        if any(self.epochs.values()):  # a worker's copy may have what was decided and told to no other server
            self.samples.reported([entry])
        elif entry[:2] not in self.doubles:
            self.fail(f"{entry} is late on some slices and counts on others")

    def applied(self, server: Host, number: int, hosted: Hosted, fresh: Iterable[Entry], is_primary: bool) -> None:
        """After each apply, on primary and backup."""
        mark = hosted.digest
        for entry in fresh:
            if entry not in self.sent:
                self.fail(f"{entry} is applied on slice {number} and was never sent")
            if hosted.ledger[entry] != 1:
                self.fail(f"{entry} is applied {hosted.ledger[entry]} times on slice {number} of {server.life}")
            limit = server.limits.get(entry[:2])
            if limit is not None and entry[2] > limit:
                self.fail(f"{entry} is applied on {server.life}, where it is fenced and settled at {limit}")
            mark ^= zlib.crc32(repr(entry).encode())
        hosted.digest = mark
        self.samples.applied(number, hosted, fresh)
        key = (number, hosted.epoch, hosted.state.version)
        is_first = key not in self._digests
        if self._digests.setdefault(key, mark) != mark:
            self.fail(f"slice {number} has two contents at version {hosted.state.version}, one on {server.life}")
        if self.policy.in_rounds and not self.server_losses:
            self._check_round(number, fresh)
        if self.policy.spare and not any(self.epochs.values()) and not self.doubles:
            self._check_order(number, hosted, fresh)
        if is_primary and (is_first or not hosted.targets):
            self._hold_office(server, number, hosted)

    def _check_round(self, number: int, fresh: Iterable[Entry]) -> None:
        """In `sync` a round has the same steps on every slice."""
        group = frozenset(fresh)
        for entry in sorted(group):
            if self._rounds.setdefault(entry, group) != group:
                self.fail(f"{entry} is in another round on slice {number}: {sorted(group)}")

    def _check_order(self, number: int, hosted: Hosted, fresh: Iterable[Entry]) -> None:
        """With spare workers too: and rounds come in one order to all slices, whoever has decided on them."""
        counted = [entry for entry in fresh if not self._is_late.get(entry)]
        if counted:
            self._check_round(number, counted)
            place = self._order.setdefault(min(counted), len(self._order))
            later = [e for e in hosted.ledger if self._order.get(e, -1) > place]
            if later:
                self.fail(f"{min(counted)} comes after {later[0]} on slice {number}, and before it on another")

    def _hold_office(self, server: Host, number: int, hosted: Hosted) -> None:
        mine = (hosted.epoch, server.generation, server.life)
        last = self._offices.get(number)
        if last is not None and last[0] > mine[0]:
            return  # it was given up, and came back from a copy: nobody takes its answers
        if last is not None and (mine[:2] < last[:2] or (mine[:2] == last[:2] and mine[2] != last[2])):
            self.fail(f"slice {number} is updated by {mine[2]} in generation {mine[1]} after {last[2]} in {last[1]}")
        self._offices[number] = mine

    def seen(self, life: str, number: int, epoch: int, version: int) -> None:
        """A worker was told this version."""
        last = self._seen.get((life, number), (0, 0))
        if (epoch, version) < last:
            self.fail(f"{life} sees slice {number} go back from {last} to {(epoch, version)}")
        if epoch > last[0] and version < last[1] and not self.is_revoked(number, self.world.now):
            self.fail(f"{life} sees slice {number} go back from {last} to {(epoch, version)}, which nobody reported")
        self._seen[life, number] = (epoch, version)

    def is_revoked(self, number: int, when: float) -> bool:
        return when <= self.revoked.get(number, -1.0) or (number in self.revoked and when == self.world.now)

    def acknowledge(self, entry: Entry, holders: dict[int, Hosted | None], when: float) -> None:
        """A worker has all answers to a step."""
        self.acknowledged.setdefault(entry, when)
        for number, hosted in holders.items():
            # A server that has given the slice away since it answered is looked at when the generation is released.
            if hosted is not None and hosted.ledger.get(entry) != 1 and not self.is_revoked(number, self.sent[entry]):
                self.fail(f"{entry} is acknowledged and not on slice {number}")
        if self.policy.kind == "bounded" and self.is_even:
            self._check_lag(entry)

    def _check_lag(self, entry: Entry) -> None:
        others = {w: 0 for w in {e[:2] for e in self.sent} if w not in self.fenced}
        for name, incarnation, clock in self.sent:
            if (name, incarnation) in others:
                others[name, incarnation] = max(others[name, incarnation], clock)
        slowest = min(others.values(), default=entry[2])
        if entry[2] - slowest > self.policy.bound:
            self.fail(f"{entry} is answered while the slowest is at {slowest}: more than {self.policy.bound} apart")

    # -- what the coordinator says ------------------------------------------------------------------------

    def report_double(self, workers: Iterable[Identity], text: str) -> None:
        """A worker and a server were lost in one step: its last steps may be on some servers only."""
        if not self.server_losses:
            self.fail(f"{text}: reported, and no server was lost")
        self.doubles.update(workers or self.fenced)
        open_ = [entry for entry in self.sent if entry[:2] in self.doubles and entry not in self.acknowledged]
        self.samples.reported(open_)
        self.reports.append(text)

    def report_restored(
        self, slices: dict[int, Hosted | None], epoch: int, num_revoked: int, is_double: bool, acks: Container[Sample]
    ) -> None:
        """`acks`: samples that are leased and not done by what the coordinator has kept, where slice 0 is among them;
        else none."""
        for number, hosted in slices.items():
            self.epochs[number] = epoch
            if num_revoked or is_double:
                self.revoked[number] = self.world.now
                there = hosted.ledger if hosted is not None else ()
                self.samples.revoked(number, [entry for entry in self.sent if entry not in there])
        self.samples.reported(self.sent, acks)
        self.reports.append(f"{num_revoked} acknowledged updates were revoked")

    # -- moments ------------------------------------------------------------------------------------------

    def released(self, primaries: dict[int, Hosted | None], settled: Iterable[Identity]) -> None:
        """A generation is everywhere: what was acknowledged is where it should be."""
        self.fenced.update(settled)
        for number, hosted in primaries.items():
            if hosted is None:
                self.fail(f"slice {number} has a primary that does not have it")
                return
            for entry, when in self.acknowledged.items():
                lost = self.is_revoked(number, self.sent[entry])
                if entry not in hosted.ledger and not lost:
                    self.fail(f"{entry} was acknowledged at {when:.4f} and is not on slice {number}")
        if not self.policy.in_rounds:
            self._all_or_none(primaries, self.fenced)

    def _all_or_none(self, primaries: dict[int, Hosted | None], workers: Iterable[Identity] | None) -> None:
        chosen = None if workers is None else set(workers)
        for entry, when in self.sent.items():
            if (chosen is not None and entry[:2] not in chosen) or entry[:2] in self.doubles:
                continue
            there = [n for n, h in primaries.items() if h is not None and entry in h.ledger]
            lacking = [n for n in primaries if n not in there and not self.is_revoked(n, when)]
            if there and lacking:
                self.fail(f"{entry} is on slices {there} and not on {lacking}")

    def final(self, primaries: dict[int, Hosted | None]) -> None:
        self.released(primaries, ())
        self._all_or_none(primaries, None)
        self.samples.final(primaries)
