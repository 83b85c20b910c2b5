"""Taking up a checkpoint: on another number of servers, cut otherwise, everything is where it was."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline.core.checkpoint.manifest import Manifest
from syncline.core.layout import Parameter
from syncline.core.rule import RuleSpec
from syncline.core.wire.checkpoints import Resume
from syncline.core.wire.control import Host
from syncline.core.wire.traffic import Upload
from syncline.errors import ProtocolError, StoreError
from syncline.net.transport import buffer_of
from syncline.store.folders import Folder

from .conftest import WAIT, House, eventually
from .snapshots import save

MakeHouse = Callable[..., House]
Values = dict[str, np.ndarray[Any, Any]]
Given = tuple[Folder, Manifest, str, Any]

#: Parameters of several sizes, some cut, some not; by the names of their rules.
SHAPES = {"a": (37,), "b": (11, 13), "c": (1,), "d": (200,)}
RULES = {
    "Adam": {"lr": 0.1},
    "SGD": {"lr": 0.5, "momentum": 0.5},
    "Muon": {"lr": 0.1},
    "Adafactor": {"lr": 0.1},
    "Add": {},
    "Rprop": {"lr": 0.1},
}


def shapes_for(rule: str) -> dict[str, tuple[int, ...]]:
    return {"b": (11, 13), "e": (5, 30)} if rule == "Muon" else SHAPES


def random_values(rule: str, seed: int, dtype: str = "float32") -> Values:
    """Whole numbers; of bfloat16 their upper halves."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes_for(rule).items():
        values = random.integers(-8, 8, size=shape).astype(np.float32)
        found[name] = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else values
    return found


def host(house: House, prefix: str, rule: str, dtype: str, options: dict[str, Any]) -> Any:
    """Registers and hosts; the first values are still to come."""
    parameters = [Parameter(prefix + name, dtype, shape) for name, shape in shapes_for(rule).items()]
    ordinal = len(house.registry.layout.segments)
    decision = house.registry.register(
        "worker-0", True, ordinal, parameters, [RuleSpec(rule, options or RULES[rule])], "sum"
    )
    assert decision.segment is not None
    house.sync_replica_sets(decision.segment)
    return decision.segment


def upload(house: House, segment: Any, values: Values) -> None:
    flat = house.flat(values, segment.index)
    for part in segment.slices:
        data = flat[part.offset : part.offset + part.num_bytes]
        message = Upload(segment.index, [part.id])
        call = house.workers["worker-0"].ask(
            house.replica_sets[part.id].primary, message, buffers=[buffer_of(data)], payload_bytes=part.num_bytes
        )
        call.wait(WAIT)


def push(house: House, clock: int, grads: Values) -> None:
    for call in house.workers["worker-0"].commit_all(clock, grads):
        call.wait(WAIT)


def named(prefix: str, values: Values) -> Values:
    return {prefix + name: value for name, value in values.items()}


def raw(house: House, name: str) -> np.ndarray[Any, Any]:
    """The bytes of a parameter, put together from the primaries."""
    segment, index = house.registry.layout.where[name]
    flat = np.zeros(segment.num_bytes, np.uint8)
    for part in segment.slices:
        flat[part.offset : part.offset + part.num_bytes] = house.slot(
            house.replica_sets[part.id].primary, part.id
        ).memory
    parameter, offset = segment.parameters[index], segment.offsets[index]
    return flat[offset : offset + parameter.num_bytes]


def states(house: House) -> dict[tuple[str, str], Any]:
    """Rule state by parameter and key: what is elementwise put together, else as it is in its first slice."""
    found: dict[tuple[str, str], Any] = {}
    for part in sorted(house.registry.layout.slices(), key=lambda p: (p.segment, p.offset)):
        slot = house.slot(house.replica_sets[part.id].primary, part.id)
        for entry, tensor in slot.rules.state():
            piece = slot.rules.pieces[entry.piece]
            key = (slot.segment.parameters[piece.parameter].name, entry.key)
            values = tensor.float().numpy()
            if values.size == piece.num_items and values.ndim:
                found.setdefault(key, []).append(values.reshape(-1))
            else:
                found.setdefault(key, [values.reshape(-1)])
    return {key: np.concatenate(parts).tobytes() for key, parts in found.items()}


def two_servers(make_house: MakeHouse, rule: str, dtype: str = "float32", **options: Any) -> House:
    """Three updates on two servers; with several segments."""
    house = make_house(2, 1, policy="async", slice_bytes=256)
    for prefix in ("p.", "q."):
        values = random_values(rule, 1, dtype)
        upload(house, host(house, prefix, rule, dtype, options), named(prefix, values))
    for clock in (1, 2, 3):
        push(house, clock, both(rule, clock, dtype))
    return house


def both(rule: str, seed: int, dtype: str) -> Values:
    values = random_values(rule, 10 + seed, dtype)
    return {**named("p.", values), **named("q.", values)}


def saved(house: House, path: pathlib.Path) -> Given:
    return save(house.tell, list(house.servers), house.registry.layout, path)


def resume(house: House, given: Given, **fields: Any) -> None:
    folder, _, digest, _ = given
    calls = []
    for server in house.servers:
        mine = [part.id for part in house.parts(server)]
        calls.append(house.tell(server, Resume(folder.url, digest, mine, **fields)))
    for call in calls:
        call.wait(WAIT)


@pytest.mark.parametrize("servers", [1, 3, 5])
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [("Adam", "float32"), ("Adam", "bfloat16"), ("SGD", "float32"), ("Muon", "float32"), ("Add", "float32"),
     ("Adafactor", "float32"), ("Rprop", "float32")],
)  # fmt: skip
def test_on_another_number_of_servers_everything_is_as_it_was(
    make_house: MakeHouse, tmp_path: Any, rule: str, dtype: str, servers: int
) -> None:
    before = two_servers(make_house, rule, dtype)
    given = saved(before, tmp_path)
    after = make_house(servers, 1, policy="async", slice_bytes={1: 4096, 3: 192, 5: 64}[servers])
    for prefix in ("p.", "q."):
        host(after, prefix, rule, dtype, {})
    resume(after, given)
    names = list(before.registry.layout.where)
    assert all((raw(before, name) == raw(after, name)).all() for name in names)
    assert states(before) == states(after) and (states(before) or rule == "Add")
    assert {after.slot(after.replica_sets[n].primary, n).state.version for n in after.replica_sets} == {3}
    assert {
        clock
        for n in after.replica_sets
        for clock in after.slot(after.replica_sets[n].primary, n).state.clocks.values()
    } <= {0}
    grads = both(rule, 9, dtype)
    push(before, 4, grads)
    push(after, 1, grads)
    for name in names:
        one, two = raw(before, name), raw(after, name)
        if dtype == "bfloat16" or rule in ("SGD", "Add"):
            assert (one == two).all(), name
        else:
            np.testing.assert_allclose(one.view(np.float32), two.view(np.float32), rtol=1e-6, atol=1e-6)


def test_it_has_a_backup_at_once(make_house: MakeHouse, tmp_path: Any) -> None:
    before = two_servers(make_house, "Adam")
    given = saved(before, tmp_path)
    after = make_house(2, 1, policy="async", replicas=2, slice_bytes=256)
    for prefix in ("p.", "q."):
        host(after, prefix, "Adam", "float32", {})
    after.seed("server-0", "server-1")
    after.seed("server-1", "server-0")
    resume(after, given)

    def is_backed(number: int) -> bool:
        one, two = (after.slot(server, number) for server in after.servers)
        same = (one.memory == two.memory).all() and len(one.rules.state()) == len(two.rules.state()) > 0
        return bool(same) and one.state.version == two.state.version == 3

    eventually(lambda: all(is_backed(number) for number in after.replica_sets))
    push(after, 1, both("Adam", 9, "float32"))
    value = {name: raw(after, name) for name in after.registry.layout.where}
    after.kill("server-0")
    after.promote()
    assert all((raw(after, name) == value[name]).all() for name in value)


def test_with_clocks_for_a_job_that_goes_on(make_house: MakeHouse, tmp_path: Any) -> None:
    """Also of workers that have left since: `copied` says what else is gone."""
    before = two_servers(make_house, "SGD")
    folder, _, digest, clocks = saved(before, tmp_path)
    (life,) = clocks
    after = make_house(2, 1, policy="async", slice_bytes=256)
    for prefix in ("p.", "q."):
        host(after, prefix, "SGD", "float32", {})
    assert after.workers["worker-0"].incarnation == life[1]
    for server in after.servers:
        mine = [part.id for part in after.parts(server)]
        after.tell(server, Resume(folder.url, digest, mine, clocks=True, known=[7] * len(mine))).wait(WAIT)
    for number, replica_set in after.replica_sets.items():
        slot = after.slot(replica_set.primary, number)
        assert slot.state.clocks == {life: 3} and slot.copied == {f"{life[0]}#{life[1]}": 3}
        assert slot.state.version == 7


def test_a_group_that_starts_afresh_has_its_values_and_no_state(make_house: MakeHouse, tmp_path: Any) -> None:
    before = two_servers(make_house, "Adam")
    after = make_house(1, 1, policy="async", slice_bytes=256)
    for prefix in ("p.", "q."):
        host(after, prefix, "Adam", "float32", {})
    resume(after, saved(before, tmp_path), fresh=[(1, 0)])
    assert all((raw(before, name) == raw(after, name)).all() for name in before.registry.layout.where)
    assert {name[:2] for name, _ in states(after)} == {"p."}


def test_said_again_it_changes_nothing_and_values_are_not_taken_over(make_house: MakeHouse, tmp_path: Any) -> None:
    before = two_servers(make_house, "SGD")
    given = saved(before, tmp_path)
    after = make_house(1, 1, policy="async", slice_bytes=256)
    for prefix in ("p.", "q."):
        host(after, prefix, "SGD", "float32", {})
    resume(after, given)
    push(after, 1, both("SGD", 9, "float32"))
    now = raw(after, "p.d").copy()
    resume(after, given)
    assert (raw(after, "p.d") == now).all()
    with pytest.raises(StoreError, match="has its values already"):
        resume(before, given)


def test_what_is_not_there_or_damaged_is_refused_in_words(make_house: MakeHouse, tmp_path: Any) -> None:
    before = two_servers(make_house, "SGD")
    folder, manifest, digest, _ = saved(before, tmp_path)
    after = make_house(1, 1, policy="async", slice_bytes=256)
    first = host(after, "p.", "SGD", "float32", {})
    numbers = [part.id for part in first.slices]

    def ask(match: str, **fields: Any) -> None:
        wanted = {"folder": folder.url, "digest": digest, "slices": numbers, **fields}
        with pytest.raises((StoreError, ProtocolError), match=match):
            after.tell("server-0", Resume(**wanted)).wait(WAIT)
        assert not any(after.slot("server-0", n).uploaded for n in numbers)

    ask("is another one than expected", digest="0" * 64)
    ask("manifest", folder=str(tmp_path / "nowhere"))
    ask("does not host slice 99", slices=[99])
    parameters = [Parameter("p.d", "float32", (100,)), Parameter("other", "float32", (3,))]
    for parameter, words in zip(parameters, ("in the checkpoint it is", "has no parameter 'other'"), strict=True):
        other = make_house(1, 1, policy="async")
        decision = other.registry.register("worker-0", True, 0, [parameter], [RuleSpec("SGD", {"lr": 1.0})], "sum")
        assert decision.segment is not None
        other.tell("server-0", Host(decision.segment, [0])).wait(WAIT)
        with pytest.raises(StoreError, match=words):
            other.tell("server-0", Resume(folder.url, digest, [0])).wait(WAIT)
    path = folder.path / manifest.files[0].name
    content = bytearray(path.read_bytes())
    (saved_slice,) = [s for s in manifest.slices if s.id == min(s.id for s in manifest.slices if s.file == path.name)]
    (tensor,) = [t for t in manifest.files[0].tensors if t.name == saved_slice.tensor]
    place = len(content) - max(t.end for t in manifest.files[0].tensors) + tensor.begin
    content[place] ^= 1
    path.write_bytes(bytes(content))
    ask("damaged")
    content[place] ^= 1
    path.write_bytes(bytes(content))
    after.tell("server-0", Resume(folder.url, digest, numbers)).wait(WAIT)


def test_only_what_is_needed_is_read(make_house: MakeHouse, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor at most once; by all servers together not much more than there is."""
    from syncline.server import restore

    read: list[str] = []
    into = restore.TensorReader.read_into

    def reading(self: Any, name: str, views: Any) -> None:
        read.append(name)
        into(self, name, views)

    monkeypatch.setattr(restore.TensorReader, "read_into", reading)
    before = two_servers(make_house, "Adam")
    given = saved(before, tmp_path)
    after = make_house(1, 1, policy="async", slice_bytes=64)
    for prefix in ("p.", "q."):
        host(after, prefix, "Adam", "float32", {})
    resume(after, given)
    assert len(read) == len(set(read)) == sum(len(file.tensors) for file in given[1].files)
