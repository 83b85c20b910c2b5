"""Layout: parameter names to (dtype, shape, offset). A later registration adds a segment and moves nothing."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from syncline.core.replica_sets import ReplicaSet
from syncline.core.rule import PLAIN, Rule, RuleSpec
from syncline.errors import LayoutError, RuleError

ALIGN = 64
FLOATS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
INTEGERS = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
ITEM_BYTES = {**FLOATS, **INTEGERS}
REDUCE = ("mean", "sum")
#: Names of Syncline's own numbers begin with this. They are not a model's, and not among its weights.
OWN_PREFIX = "syncline."
MAX_DIMENSIONS = 64
MAX_PARAMETERS = 1 << 20
MAX_SEGMENT_BYTES = 1 << 44


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """One registered parameter; `group` is the number of its rule within the registration."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: int = 0

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_items * ITEM_BYTES[self.dtype]

    def describe(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous piece of a segment, one dtype: what is pushed, locked, versioned and moved."""

    id: int
    segment: int
    dtype: str
    offset: int  # bytes, within the segment
    num_bytes: int


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The part of one parameter that lies in one slice: the unit of a rule."""

    parameter: int  # index within the segment
    start: int  # first item, within the parameter
    num_items: int
    offset: int  # bytes, within the slice


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One registration: its parameters at their offsets, its rules, and (once placed) its slices."""

    index: int  # position in the layout
    ordinal: int  # index among the chief's register() calls
    first_parameter: int  # job-wide id of its first parameter
    parameters: tuple[Parameter, ...]
    offsets: tuple[int, ...]  # bytes, parallel to parameters; ascending
    num_bytes: int
    rules: tuple[RuleSpec, ...]
    reduce: str
    slices: tuple[Slice, ...] = ()

    def rule_of(self, parameter: Parameter) -> RuleSpec:
        return self.rules[parameter.group]

    def pieces(self, part: Slice) -> list[Piece]:
        """The pieces of parameters in a slice, in order of their offsets; empty parameters have none."""
        found = []
        end = part.offset + part.num_bytes
        first = max(0, bisect.bisect_right(self.offsets, part.offset) - 1)
        for index in range(first, len(self.parameters)):
            begin = self.offsets[index]
            if begin >= end:
                break
            parameter = self.parameters[index]
            low, high = max(begin, part.offset), min(begin + parameter.num_bytes, end)
            if low < high:
                size = ITEM_BYTES[parameter.dtype]
                found.append(Piece(index, (low - begin) // size, (high - low) // size, low - part.offset))
        return found


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def arrange(
    parameters: Sequence[Parameter],
    rules: Sequence[Rule],
    reduce: str,
    *,
    index: int = 0,
    ordinal: int = 0,
    first_parameter: int = 0,
) -> Segment:
    """A segment without slices: parameters by dtype, each at an aligned offset, in the order given."""
    check_parameters(parameters, rules, reduce)
    dtypes = list(dict.fromkeys(p.dtype for p in parameters))
    # Rules that need whole tensors come first within a dtype, so that the splittable part is contiguous.
    ordered = sorted(parameters, key=lambda p: (dtypes.index(p.dtype), rules[p.group].elementwise))
    offsets, end = [], 0
    for parameter in ordered:
        offsets.append(end)
        end += aligned(parameter.num_bytes)
    if end > MAX_SEGMENT_BYTES:
        raise LayoutError(f"{end} bytes in one registration; at most {MAX_SEGMENT_BYTES}")
    return Segment(
        index=index,
        ordinal=ordinal,
        first_parameter=first_parameter,
        parameters=tuple(ordered),
        offsets=tuple(offsets),
        num_bytes=end,
        rules=tuple(rule.spec for rule in rules),
        reduce=reduce,
    )


def check_parameters(parameters: Sequence[Parameter], rules: Sequence[Rule], reduce: str) -> None:
    if not parameters:
        raise LayoutError("nothing to register: the parameters are empty")
    if len(parameters) > MAX_PARAMETERS:
        raise LayoutError(f"{len(parameters)} parameters in one registration; at most {MAX_PARAMETERS}")
    if reduce not in REDUCE:
        raise LayoutError(f"reduce = {reduce!r}: must be one of {', '.join(REDUCE)}")
    seen: set[str] = set()
    for parameter in parameters:
        if parameter.name in seen:
            raise LayoutError(f"two parameters are named {parameter.name!r}; names must differ")
        seen.add(parameter.name)
        if parameter.dtype not in ITEM_BYTES:
            raise LayoutError(f"{parameter.name!r} has dtype {parameter.dtype}; supported: {', '.join(ITEM_BYTES)}")
        if len(parameter.shape) > MAX_DIMENSIONS:
            raise LayoutError(f"{parameter.name!r} has {len(parameter.shape)} dimensions; at most {MAX_DIMENSIONS}")
        if any(size < 0 for size in parameter.shape):
            raise LayoutError(f"{parameter.name!r} has a negative size in its shape {parameter.shape}")
        if not 0 <= parameter.group < len(rules):
            raise LayoutError(f"{parameter.name!r} names rule {parameter.group}; there are {len(rules)}")
        check_rule_fits(parameter, rules[parameter.group])


def check_rule_fits(parameter: Parameter, rule: Rule) -> None:
    if parameter.dtype in INTEGERS and rule.name not in PLAIN:
        raise RuleError(f"{parameter.name!r} is {parameter.describe()}; integers take Add or Assign, not {rule.name}")
    if parameter.dtype == "bool" and rule.name != "Assign":
        raise RuleError(f"{parameter.name!r} is {parameter.describe()}; bool takes Assign, not {rule.name}")
    if rule.name == "Muon" and len(parameter.shape) != 2:
        raise RuleError(f"{parameter.name!r} is {parameter.describe()}; Muon takes matrices only")


class Layout:
    """All segments of a job, by parameter name."""

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        self.segments: list[Segment] = []
        self.where: dict[str, tuple[Segment, int]] = {}
        self.num_parameters = 0
        self.num_slices = 0
        self._pieces: dict[int, list[Piece]] = {}
        for segment in segments:
            self.add(segment)

    def add(self, segment: Segment) -> None:
        assert segment.index == len(self.segments) and segment.first_parameter == self.num_parameters
        self.segments.append(segment)
        for index, parameter in enumerate(segment.parameters):
            self.where[parameter.name] = (segment, index)
        self.num_parameters += len(segment.parameters)
        self.num_slices += len(segment.slices)

    def drop_last(self) -> Segment:
        """Removes the newest segment, which could not be hosted."""
        segment = self.segments.pop()
        self._pieces.clear()
        for parameter in segment.parameters:
            del self.where[parameter.name]
        self.num_parameters -= len(segment.parameters)
        self.num_slices -= len(segment.slices)
        return segment

    def knows_all(self, parameters: Sequence[Parameter]) -> bool:
        return all(p.name in self.where for p in parameters)

    def check_same(self, parameters: Sequence[Parameter], who: str) -> None:
        """Raises LayoutError at the first parameter that differs from the job's."""
        for parameter in parameters:
            if parameter.name not in self.where:
                raise LayoutError(
                    f"{who} registered {parameter.name!r} as {parameter.describe()}, the job has no parameter "
                    f"of that name; start {who} with the same model as the rest of the job"
                )
            segment, index = self.where[parameter.name]
            known = segment.parameters[index]
            if (known.dtype, known.shape) != (parameter.dtype, parameter.shape):
                raise LayoutError(
                    f"{who} registered {parameter.name!r} as {parameter.describe()}, the job has "
                    f"{known.describe()}; start {who} with the same model as the rest of the job"
                )

    def check_complete(self, segment: Segment, parameters: Sequence[Parameter], who: str) -> None:
        """Raises LayoutError if a registration has missing or foreign parameters."""
        given = {p.name for p in parameters}
        for known in segment.parameters:
            if known.name not in given:
                raise LayoutError(
                    f"{who} did not register {known.name!r}, the job has it as {known.describe()}; start {who} "
                    "with the same model as the rest of the job"
                )
        # Both are errors, whether the chief has made its next registration yet or not.
        for parameter in parameters:
            if self.where[parameter.name][0] is not segment:
                raise LayoutError(
                    f"{who} registered {parameter.name!r} together with {segment.parameters[0].name!r}, the job by "
                    f"itself; start {who} with the same model as the rest of the job"
                )

    def pieces(self, part: Slice) -> list[Piece]:
        """The segment's `pieces`, cached per slice."""
        if part.id not in self._pieces:
            self._pieces[part.id] = self.segments[part.segment].pieces(part)
        return self._pieces[part.id]

    def slices(self) -> Iterator[Slice]:
        for segment in self.segments:
            yield from segment.slices

    def slices_with(self, ranges: Ranges) -> set[int]:
        """The ids of the slices that contain any of these parameters."""
        found: set[int] = set()
        for start, stop in ranges:
            for segment in self.segments:
                low = max(start - segment.first_parameter, 0)
                high = min(stop - segment.first_parameter, len(segment.parameters))
                if low < high:
                    begin = segment.offsets[low]
                    end = segment.offsets[high - 1] + segment.parameters[high - 1].num_bytes
                    found.update(p.id for p in segment.slices if p.offset < end and p.offset + p.num_bytes > begin)
        return found

    def parameter_id(self, name: str) -> int:
        segment, index = self.where[name]
        return segment.first_parameter + index


Ranges = tuple[tuple[int, int], ...]


def to_ranges(ids: Iterable[int]) -> Ranges:
    """Sorted ids as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(ids):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """These ids without the others. All are sorted."""
    if not others:
        return ranges
    left: list[tuple[int, int]] = []
    following, position = [*others, (math.inf, math.inf)], 0
    for start, stop in ranges:
        while start < stop:
            low, high = following[position]
            if low > start:
                left.append((start, int(min(low, stop))))
            if high >= stop:
                break  # it may extend into the next range
            start, position = max(start, int(high)), position + 1
    return tuple(left)


def in_ranges(ranges: Ranges, number: int) -> bool:
    position = bisect.bisect_right(ranges, (number, math.inf)) - 1
    return position >= 0 and ranges[position][0] <= number < ranges[position][1]


def covers(ranges: Ranges, start: int, stop: int) -> bool:
    """Whether every id from start to stop is in the ranges."""
    position = bisect.bisect_right(ranges, (start, math.inf)) - 1
    return start >= stop or (position >= 0 and ranges[position][0] <= start and stop <= ranges[position][1])


#: A contiguous run of one dtype for one server.
Run = tuple[str, str, int, int]  # server, dtype, offset, num_bytes


def place(
    segment: Segment, servers: Sequence[str], loads: Mapping[str, int], slice_bytes: int, first_slice: int
) -> tuple[Segment, list[ReplicaSet]]:
    """Places a segment: its slices and their primaries, so that the servers' bytes are balanced.

    Unsplittable tensors go first, largest first, to the least loaded server. Then splittable data fills all servers
    to the same level, in slices of about `slice_bytes`.
    """
    assert servers and slice_bytes >= ALIGN
    level = {server: loads.get(server, 0) for server in servers}
    whole, blocks = _split(segment, slice_bytes)
    runs: list[Run] = []
    for dtype, offset, num_bytes in sorted(whole, key=lambda item: (-item[2], item[1])):
        server = min(servers, key=lambda name: level[name])
        level[server] += num_bytes
        runs.append((server, dtype, offset, num_bytes))
    for dtype, offset, num_bytes in sorted(blocks, key=lambda item: item[2]):
        runs += _pour(dtype, offset, num_bytes, servers, level)
    slices, replica_sets = _cut(segment, runs, slice_bytes, first_slice)
    return msgspec.structs.replace(segment, slices=tuple(slices)), replica_sets


Block = tuple[str, int, int]  # dtype, offset, num_bytes


def _split(segment: Segment, slice_bytes: int) -> tuple[list[Block], list[Block]]:
    """Blocks that stay whole (small tensors combined), and one splittable block per dtype."""
    whole: list[Block] = []
    free: dict[str, list[int]] = {}
    for parameter, offset in zip(segment.parameters, segment.offsets, strict=True):
        size = aligned(parameter.num_bytes)
        if segment.rule_of(parameter).elementwise:
            begin_end = free.setdefault(parameter.dtype, [offset, offset])
            begin_end[1] = offset + size
        elif size:
            last = whole[-1] if whole else None
            joins = last and last[0] == parameter.dtype and last[1] + last[2] == offset
            if last and joins and last[2] + size <= slice_bytes // 4:
                whole[-1] = (last[0], last[1], last[2] + size)
            else:
                whole.append((parameter.dtype, offset, size))
    return whole, [(dtype, begin, end - begin) for dtype, (begin, end) in free.items() if end > begin]


def _pour(dtype: str, offset: int, num_bytes: int, servers: Sequence[str], level: dict[str, int]) -> list[Run]:
    """Distributes a block over the servers in contiguous runs, as evenly as possible."""
    ranked = sorted(servers, key=lambda name: level[name])  # stable: ties in the given order
    for count in range(len(ranked), 0, -1):
        target = (num_bytes + sum(level[name] for name in ranked[:count])) / count
        if target >= level[ranked[count - 1]]:
            break
    runs, start, wanted = [], 0, 0.0
    for position, server in enumerate(ranked[:count]):
        wanted += target - level[server]
        stop = num_bytes if position == count - 1 else min(num_bytes, round(wanted / ALIGN) * ALIGN)
        if stop > start:
            runs.append((server, dtype, offset + start, stop - start))
            level[server] += stop - start
            start = stop
    return runs


def _cut(
    segment: Segment, runs: list[Run], slice_bytes: int, first_slice: int
) -> tuple[list[Slice], list[ReplicaSet]]:
    slices: list[Slice] = []
    replica_sets: list[ReplicaSet] = []
    whole_starts = {
        offset
        for parameter, offset in zip(segment.parameters, segment.offsets, strict=True)
        if parameter.num_bytes and not segment.rule_of(parameter).elementwise
    }
    for server, dtype, offset, num_bytes in sorted(runs, key=lambda run: run[2]):
        count = 1 if offset in whole_starts else max(1, -(-num_bytes // slice_bytes))
        edges = [round(num_bytes * k / count / ALIGN) * ALIGN for k in range(count)] + [num_bytes]
        for begin, end in itertools.pairwise(edges):
            if end > begin:
                number = first_slice + len(slices)
                slices.append(Slice(number, segment.index, dtype, offset + begin, end - begin))
                replica_sets.append(ReplicaSet(number, server))
    return slices, replica_sets
