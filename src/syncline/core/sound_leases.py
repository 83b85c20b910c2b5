"""Whether the ledger of a manifest can be true: batches, spans in their place and apart, numbers of leases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from syncline.core.leasing import MOST_SEEDS, SHARD_POSITIONS, LeaseState
from syncline.core.ledger import Epoch, Lease
from syncline.core.loader import MOST_SAMPLES, Loader
from syncline.core.places import Places
from syncline.core.spans import Span
from syncline.errors import ConfigError, StoreError

_MOST = 1 << 62
#: More than a job can have come through.
_MOST_EPOCHS = 1 << 32
#: Pairs of spans in one another's reach: thousands of workers have fewer.
_MOST_PAIRS = 1 << 23


def check_leases(state: LeaseState) -> None:
    """Raises StoreError at the first thing that cannot be."""
    _require(1 <= state.next_lease <= _MOST, f"its next lease would be {state.next_lease}")
    for name, loader in state.loaders.items():
        try:
            loader.check()
        except ConfigError as error:
            raise StoreError(f"loader {name!r}: {error}") from error
    for name, seed in state.seeds.items():
        _require(0 <= seed < MOST_SEEDS, f"the seed of {name!r} cannot be {seed}")
    for name, finished in state.finished.items():
        _check_places(finished, _MOST, f"the finished epochs of {name!r}")
        _require(sum(end - begin for begin, end in finished) <= _MOST_EPOCHS, f"{name!r} cannot have so many epochs")
    numbers: set[int] = set()
    for name, epochs in state.epochs.items():
        for number, epoch in epochs.items():
            what = f"epoch {number} of {name!r}"
            _require(name in state.loaders, f"{what} is of no loader")
            _require(0 <= number <= _MOST, f"{what} cannot be")
            _check_epoch(epoch, state.loaders[name], state.next_lease, what)
            _require(numbers.isdisjoint(epoch.leases), f"{what}: a lease is there twice")
            numbers.update(epoch.leases)


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise StoreError(words)


def _check_places(places: Sequence[Places], most: int, what: str) -> None:
    last = -1
    for begin, end in places:
        _require(last < begin < end <= most and begin >= 0, f"{what} are out of order, or beyond their end")
        last = end


def _check_epoch(epoch: Epoch, loader: Loader, next_lease: int, what: str) -> None:
    _require(1 <= epoch.batch <= MOST_SAMPLES, f"{what} has batches of {epoch.batch}")
    most = 0 if loader.num_shards else loader.num_samples
    _require(0 <= epoch.num_samples <= most, f"{what} has {epoch.num_samples} samples, its loader {most}")
    counts = (epoch.num_done, epoch.num_passed_over)
    _require(all(0 <= count <= _MOST for count in counts), f"{what}: what is done of it cannot be")
    stop = loader.num_shards * SHARD_POSITIONS or epoch.num_samples
    doubts = [one.span for one in [*epoch.doubts, *epoch.aside]]
    for span in [*epoch.todo, *doubts, *(lease.span for lease in epoch.leases.values())]:
        _require(span.stop <= stop, f"{what}: positions {span.start} to {span.stop} of {stop}")
        _require(bool(span.period) or not span.width, f"{what}: a span that is no comb has a width")
    for number, lease in epoch.leases.items():
        _check_lease(lease, number, next_lease, f"{what}, lease {number}")
    left = [span for lease in epoch.leases.values() for span in lease.rest()]
    _check_apart([*epoch.todo, *left], what)


def _check_lease(lease: Lease, number: int, next_lease: int, what: str) -> None:
    _require(lease.number == number and 1 <= number < next_lease, f"{what}: its number cannot be")
    _require(0 <= lease.incarnation <= _MOST and 0 <= lease.step <= _MOST, f"{what}: its life or its step cannot be")
    _require(0 <= lease.origin <= _MOST and 0 <= lease.wide <= _MOST, f"{what}: what is done before it cannot be")
    _require(0 <= lease.end <= len(lease.span), f"{what} ends behind its span")
    _check_places(lease.done, lease.end, f"{what}: the places that are done")


def _check_apart(spans: Iterable[Span], what: str) -> None:
    near: list[Span] = []
    num_pairs = 0
    for span in sorted(span for span in spans if span.start < span.stop):
        near = [other for other in near if other.stop > span.start]
        num_pairs += len(near)
        _require(num_pairs <= _MOST_PAIRS, f"{what} is in too many pieces")
        for other in near:
            _require(not overlap(other, span), f"{what}: positions from {span.start} on are there twice")
        near.append(span)


def overlap(one: Span, other: Span) -> bool:
    """Whether any position is in both; teeth are reckoned with, never counted out."""
    if not one.period:
        return _touches(other, one.start, one.stop)
    if not other.period:
        return _touches(one, other.start, other.stop)
    # The teeth of `one` that begin before `other` ends, and end after it begins.
    first = max(0, -(-(other.start + 1 - one.start - one.width) // one.period))
    last = min(one.num_teeth - 1, (other.stop - 1 - one.start) // one.period)
    if first > last:
        return False
    for tooth in (first, last):  # these two may stand out of it
        start = one.start + tooth * one.period
        if _touches(other, start, start + one.width):
            return True
    # The others hit a tooth where (their start - other.start) mod other.period is below its width, or so close to
    # the period that the tooth behind it is reached.
    begin = one.start + first * one.period - other.start
    low, high = (1 - one.width - begin), (other.width - 1 - begin)
    if high - low + 1 >= other.period:
        return last > first + 1
    found = _first_within(one.period % other.period, other.period, low % other.period, high % other.period)
    return found is not None and first + found <= last


def _touches(span: Span, begin: int, end: int) -> bool:
    begin, end = max(begin, span.start), min(end, span.stop)
    if begin >= end:
        return False
    if not span.period:
        return True
    place = (begin - span.start) % span.period
    return place < span.width or place + end - begin > span.period


def _first_within(factor: int, modulus: int, low: int, high: int) -> int | None:
    """The least x >= 0 with factor·x mod modulus in low … high, which may go over the modulus: as Euclid would."""
    if low == 0 or low > high:
        return 0
    if factor == 0:
        return None
    if 2 * factor > modulus:
        return _first_within(modulus - factor, modulus, modulus - high, modulus - low)
    x = -(-low // factor)
    if x * factor <= high:
        return x
    turns = _first_within(modulus % factor, factor, -high % factor, -low % factor)
    return None if turns is None else -(-(low + modulus * turns) // factor)
