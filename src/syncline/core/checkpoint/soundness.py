"""Validates a manifest: every reference, size and count, before any of it is used."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from syncline.core.checkpoint.manifest import FORMAT, Manifest, SavedFile, SavedSlice, SavedState, SavedTensor
from syncline.core.checkpoint.tensor_file import LENGTH_BYTES, MAX_HEADER_BYTES, MAX_TENSORS, check_entries
from syncline.core.layout import (
    ALIGN,
    ITEM_BYTES,
    MAX_SEGMENT_BYTES,
    Piece,
    Segment,
    Slice,
    aligned,
    check_parameters,
)
from syncline.core.leasing.leases import MOST_SEEDS, SHARD_POSITIONS, LeaseState
from syncline.core.leasing.ledger import Epoch, Lease
from syncline.core.leasing.loader import MOST_SAMPLES, Loader
from syncline.core.leasing.ranges import Places, Span
from syncline.core.rule import check_state
from syncline.errors import ConfigError, DamagedError, LayoutError, RuleError, StoreError

KINDS = ("whole", "weights")
_NAME = re.compile(r"([0-9]{6,18})-step-([0-9]{1,18})")
#: A plain name that cannot collide with the folder's other files.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MOST = 1 << 62


def checkpoint_name(number: int, step: int) -> str:
    """The folder of a checkpoint, within its own."""
    return f"{number:06d}-step-{step}"


def number_in(name: str) -> int | None:
    """The number in a checkpoint folder's name; None if it is no such name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def check_file_name(name: str) -> None:
    """Raises StoreError for an invalid file name, which could point outside the folder."""
    _require(_FILE_NAME.fullmatch(name) is not None, f"a file cannot be named {name!r}")


def slice_tensor(number: int) -> str:
    """The name of a slice's tensor."""
    return f"slice-{number}"


def state_tensor(number: int, piece: int, key: str) -> str:
    """The name of a tensor of a rule's state."""
    return f"slice-{number}/{piece}/{key}"


class _Writer(msgspec.Struct):
    """Identifies the writer of a manifest of any format."""

    format: int = 0
    syncline: str = ""


def decode_manifest(text: bytes, where: str) -> Manifest:
    """Parses and validates a manifest; a StoreError describes what is wrong."""
    try:
        writer = msgspec.json.decode(text, type=_Writer)
        if writer.format > FORMAT:
            raise StoreError(
                f"{where} was written by syncline {writer.syncline or '(unknown)'} in format {writer.format}; this "
                f"one reads formats up to {FORMAT}: update syncline (pip install -U syncline)"
            )
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is damaged: it is not a manifest ({error})") from error
    check_manifest(manifest, where)
    return manifest


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raises DamagedError at the first inconsistency."""
    try:
        _check_head(manifest)
        files = _check_files(manifest)
        _check_segments(manifest.segments)
        _check_slices(manifest, files)
        check_leases(manifest.leases)
    except (StoreError, LayoutError, RuleError) as error:
        raise DamagedError(f"{where} is damaged: {error}") from error


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise StoreError(words)


def _check_head(manifest: Manifest) -> None:
    _require(manifest.format == FORMAT, f"its format is {manifest.format}, which no released version has written")
    _require(manifest.kind in KINDS, f"its kind is {manifest.kind!r}; there are {', '.join(KINDS)}")
    _require(1 <= manifest.number <= _MOST and 0 <= manifest.step <= _MOST, "its number or its step cannot be")
    _require(manifest.name == checkpoint_name(manifest.number, manifest.step), f"its name is {manifest.name!r}")
    _require(bool(manifest.lineage), "it has no lineage")
    _require(bool(manifest.segments), "it has no parameters")


def _check_files(manifest: Manifest) -> dict[str, dict[str, SavedTensor]]:
    """The tensors of the servers' files, by file and name."""
    found: dict[str, dict[str, SavedTensor]] = {}
    for file in [*manifest.files, *(script.file for script in manifest.scripts)]:
        _require(file.name not in found, f"two files are named {file.name!r}")
        found[file.name] = _check_file(file)
    workers = [script.worker for script in manifest.scripts]
    _require(len(set(workers)) == len(workers), "two scripts are of one worker")
    _require(all(0 <= script.clock <= _MOST for script in manifest.scripts), "a script's clock cannot be")
    return {file.name: found[file.name] for file in manifest.files}


def _check_file(file: SavedFile) -> dict[str, SavedTensor]:
    check_file_name(file.name)
    _require(len(file.tensors) <= MAX_TENSORS, f"{file.name} has {len(file.tensors)} tensors; at most {MAX_TENSORS}")
    digests = [file.header_digest, *(tensor.digest for tensor in file.tensors)]
    _require(all(_DIGEST.fullmatch(digest) for digest in digests), f"{file.name}: a digest is none")
    header = file.num_bytes - check_entries(file.tensors, file.name)
    _require(
        LENGTH_BYTES < header <= LENGTH_BYTES + MAX_HEADER_BYTES, f"{file.name} cannot have {file.num_bytes} bytes"
    )
    tensors = {tensor.name: tensor for tensor in file.tensors}
    _require(len(tensors) == len(file.tensors), f"{file.name}: two tensors have the same name")
    return tensors


def _check_segments(segments: tuple[Segment, ...]) -> None:
    names: set[str] = set()
    first = 0
    for index, segment in enumerate(segments):
        what = f"segment {index}"
        _require(segment.index == index and segment.first_parameter == first, f"{what} is out of place")
        first += len(segment.parameters)
        check_parameters(segment.parameters, [spec.rule() for spec in segment.rules], segment.reduce)
        for parameter in segment.parameters:
            _require(parameter.name not in names, f"two parameters are named {parameter.name!r}")
            names.add(parameter.name)
        _check_offsets(segment, what)
        _check_cut(segment, what)


def _check_offsets(segment: Segment, what: str) -> None:
    _require(len(segment.offsets) == len(segment.parameters), f"{what} has other offsets than parameters")
    end = 0
    for parameter, offset in zip(segment.parameters, segment.offsets, strict=True):
        _require(offset == end, f"{parameter.name!r} is not where it must be")
        end += aligned(parameter.num_bytes)
        _require(end <= MAX_SEGMENT_BYTES, f"{what} has more than {MAX_SEGMENT_BYTES} bytes")
    _require(segment.num_bytes == end, f"{what} has {segment.num_bytes} bytes, its parameters {end}")


def _check_cut(segment: Segment, what: str) -> None:
    """Checks that the slices cover the segment: no overlap, no gap, one dtype each."""
    end = 0
    for part in sorted(segment.slices, key=lambda part: part.offset):
        _require(part.segment == segment.index and part.num_bytes > 0, f"slice {part.id} is out of place")
        _require(part.offset == end and end % ALIGN == 0, f"slice {part.id} overlaps another, or leaves a gap")
        end += part.num_bytes
        _require(
            part.dtype in ITEM_BYTES and not part.num_bytes % ITEM_BYTES[part.dtype], f"slice {part.id} is cut badly"
        )
        dtypes = {segment.parameters[piece.parameter].dtype for piece in segment.pieces(part)}
        _require(dtypes <= {part.dtype}, f"slice {part.id} is {part.dtype}, what is in it is not")
    _require(end == segment.num_bytes, f"{what} has {segment.num_bytes} bytes, its slices {end}")


def _check_slices(manifest: Manifest, files: Mapping[str, Mapping[str, SavedTensor]]) -> None:
    """Checks that every slice of every segment exists exactly once."""
    parts: dict[int, tuple[Segment, Slice]] = {}
    for segment in manifest.segments:
        for part in segment.slices:
            _require(part.id not in parts, f"two slices are number {part.id}")
            parts[part.id] = (segment, part)
    saved = [one.id for one in manifest.slices]
    _require(len(set(saved)) == len(saved), "a slice is there twice")
    missing = parts.keys() - set(saved)
    _require(not missing, f"{len(missing)} slices are missing, {min(missing, default=0)} first")
    for one in manifest.slices:
        _require(one.id in parts, f"slice {one.id} is of no segment")
        _require(one.file in files, f"slice {one.id} is in {one.file!r}, which is none of its files")
        _check_slice(one, *parts[one.id], files[one.file])


def _check_slice(one: SavedSlice, segment: Segment, part: Slice, tensors: Mapping[str, SavedTensor]) -> None:
    what = f"slice {one.id}"
    _require(one.tensor == slice_tensor(one.id) and one.tensor in tensors, f"{what}: its tensor is missing")
    tensor = tensors[one.tensor]
    _require(tensor.dtype == part.dtype, f"{what} is {part.dtype}, its tensor {tensor.dtype}")
    _require(tensor.shape == (part.num_bytes // ITEM_BYTES[part.dtype],), f"{what} has another size than its tensor")
    _require(0 <= one.version <= _MOST, f"{what} cannot have version {one.version}")
    _require(all(0 <= clock <= _MOST for _, _, clock in one.clocks), f"{what}: a clock cannot be")
    pieces = segment.pieces(part) if one.states else []
    seen = set()
    for state in one.states:
        _require(0 <= state.piece < len(pieces), f"{what} has no piece {state.piece}")
        named = state.tensor == state_tensor(one.id, state.piece, state.key) and state.tensor in tensors
        _require(named, f"{what}: the tensor of {state.key!r} of piece {state.piece} is missing")
        _check_state(what, state, segment, pieces[state.piece], tensors[state.tensor])
        seen.add(state.tensor)
    _require(len(seen) == len(one.states), f"{what}: a state is there twice")


def _check_state(what: str, state: SavedState, segment: Segment, piece: Piece, tensor: SavedTensor) -> None:
    parameter = segment.parameters[piece.parameter]
    rule = segment.rule_of(parameter)
    shape = (piece.num_items,) if rule.elementwise else parameter.shape
    try:
        check_state(rule.name, state.key, tensor.dtype, tensor.shape, (parameter.dtype, shape))
    except RuleError as error:
        raise StoreError(f"{what}: {error}") from None


#: Above any plausible number of epochs.
_MOST_EPOCHS = 1 << 32
#: Limit for pairs of overlapping spans; thousands of workers have fewer.
_MOST_PAIRS = 1 << 23


def check_leases(state: LeaseState) -> None:
    """Raises StoreError at the first inconsistency."""
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
    suspect_batches = [one.span for one in [*epoch.suspect_batches, *epoch.quarantined]]
    for span in [*epoch.todo, *suspect_batches, *(lease.span for lease in epoch.leases.values())]:
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
    """Whether two spans share a position; computed without enumerating teeth."""
    if not one.period:
        return _touches(other, one.start, one.stop)
    if not other.period:
        return _touches(one, other.start, other.stop)
    # The teeth of `one` that begin before `other` ends, and end after it begins.
    first = max(0, -(-(other.start + 1 - one.start - one.width) // one.period))
    last = min(one.num_teeth - 1, (other.stop - 1 - one.start) // one.period)
    if first > last:
        return False
    for tooth in (first, last):  # these two may lie partly outside
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
    """The least x >= 0 with factor·x mod modulus in low … high (which may exceed the modulus), by Euclid's
    algorithm.
    """
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
