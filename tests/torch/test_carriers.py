"""Gradients of a device on their way into the arena: the right bytes, in order, staged when they are there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from syncline.core.layout import Parameter, Segment, Slice, arrange, in_ranges, place
from syncline.core.rule import Rule
from syncline.torch import carriers
from syncline.torch.carriers import ArenaCarrier, MirrorCarrier
from syncline.torch.comparing import Comparison
from syncline.torch.gradients import Gradients
from syncline.torch.parameters import Tracked
from syncline.worker.exchange import finite as finite_module

SIZES = (40, 3, 70, 16, 1)


def segment_of(dtype: str = "float32") -> Segment:
    parameters = [Parameter(f"p{k}", dtype, (size,)) for k, size in enumerate(SIZES)]
    whole = arrange(parameters, [Rule("SGD", lr=1.0)], "mean")
    return place(whole, ["server-0"], {}, 128, 0)[0]


class Wire:
    """An exchange whose servers are far away: remembers what the arena held when a slice was staged."""

    checks_finite, is_arena_shared = True, False

    def __init__(self, segment: Segment, early_bytes: float = 0) -> None:
        self.early_bytes = early_bytes
        self._arena = np.zeros(segment.num_bytes, np.uint8)
        self.staged: dict[int, bytes] = {}
        self.carried: set[int] = set()

    def arena(self, segment: int) -> Any:
        return self._arena

    def bytes_of(self, part: Slice) -> bytes:
        return self._arena[part.offset : part.offset + part.num_bytes].tobytes()

    def stage(self, parts: list[Slice]) -> None:
        self.staged.update({part.id: self.bytes_of(part) for part in parts})


class Setting:
    def __init__(self, side: Any, early_bytes: float = 0) -> None:
        """`side`: of a device; none: the CPU copies."""
        self.segment = segment_of()
        self.wire: Any = Wire(self.segment, early_bytes)
        self.side = side
        self.carrier: Any = ArenaCarrier(self.wire, self.segment)
        if side is not None:
            self.carrier = MirrorCarrier(self.wire, self.segment, torch.device("cpu"), side)
        self.tensors = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
        tracked = [Tracked(f"p{k}", tensor, 0) for k, tensor in enumerate(self.tensors)]
        self.gradients = Gradients(self.carrier, self.segment, tracked, overlap=True)

    def backward(self, *which: int, factor: float = 1.0) -> None:
        numbers = which or range(len(SIZES))
        sum((self.tensors[k] * torch.arange(1.0, SIZES[k] + 1)).sum() * factor for k in reversed(numbers)).backward()  # type: ignore[union-attr]

    def check(self) -> None:
        """The arena, and what the push will say to be there as it was staged, are the gradients as they are now."""
        for index, (parameter, offset) in enumerate(zip(self.segment.parameters, self.segment.offsets, strict=True)):
            gradient = self.tensors[int(parameter.name[1:])].grad
            if gradient is not None:
                found = self.wire.arena(0)[offset : offset + parameter.num_bytes].view(np.float32)
                assert found.tolist() == gradient.tolist(), index
        for part in self.segment.slices:
            if part.id in self.wire.staged and part.id in self.gradients.as_staged:
                assert self.wire.staged[part.id] == self.wire.bytes_of(part)


@pytest.fixture(params=[1, 300, 1 << 20], ids=["slice by slice", "buckets", "one bucket"])
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, slow_side: Any) -> Setting:
    monkeypatch.setattr(carriers, "BUCKET_BYTES", request.param)
    return Setting(slow_side)


def test_everything_is_in_the_arena_after_collecting_and_was_staged_whole(setting: Setting) -> None:
    for factor in (1.0, 2.0, 3.0):
        for tensor in setting.tensors:
            tensor.grad = None
        setting.backward(factor=factor)
        pushed = setting.gradients.collect()
        assert pushed == ((0, len(SIZES)),)
        assert set(setting.wire.staged) == {part.id for part in setting.segment.slices}
        setting.check()
        setting.wire.staged.clear()


def test_nothing_is_staged_before_its_copy_has_happened(setting: Setting) -> None:
    """The copies are late: a hook that staged what it had queued would send old bytes."""
    setting.backward()
    assert setting.wire.staged == {}
    setting.side.go_on_to(setting.side.num_queued)
    setting.carrier.carry([])
    assert bool(setting.wire.staged) == bool(setting.side.num_queued)
    for part in setting.segment.slices:
        if part.id in setting.wire.staged:
            assert any(setting.wire.staged[part.id])  # no gradient here is zero
    setting.gradients.collect()
    setting.check()


def test_edited_and_late_gradients_are_carried_again(setting: Setting) -> None:
    setting.backward(0, 1, 2, 4)
    setting.tensors[2].grad.data[69] = -0.0  # type: ignore[union-attr]
    setting.tensors[3].grad = torch.full((16,), 9.0)
    assert setting.gradients.collect() == ((0, 5),)
    setting.check()
    changed = {p.id for p in setting.segment.slices if 2 in {i.parameter for i in setting.segment.pieces(p)}}
    assert changed and changed.isdisjoint(setting.gradients.as_staged)  # they go with the commit


def test_a_second_backward_a_scale_and_nothing_at_all(setting: Setting) -> None:
    setting.backward()
    setting.backward(1, 2)
    setting.gradients.collect()
    setting.check()
    setting.backward()
    setting.gradients.collect(scale=torch.tensor(0.5))
    for tensor in setting.tensors:
        tensor.grad.mul_(0.5)  # type: ignore[union-attr]
    setting.check()
    for tensor in setting.tensors:
        tensor.grad = None
    setting.backward(2)
    setting.gradients.drop()
    assert setting.side.num_done == setting.side.num_queued
    setting.tensors[2].grad = None
    assert setting.gradients.collect() == ()


def test_while_paused_nothing_travels(setting: Setting) -> None:
    setting.gradients.pause(True)
    setting.backward()
    assert setting.side.num_queued == 0
    setting.gradients.pause(False)
    setting.backward()
    setting.gradients.collect()
    setting.check()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 2, 4])
def test_a_device_finds_what_is_not_finite_wherever_it_is(setting: Setting, index: int, bad: float) -> None:
    """Also where it was edited after backward, and never where all is finite."""
    setting.backward()
    assert setting.gradients.collect() == setting.gradients.finite != ()
    gradient = setting.tensors[index].grad
    assert gradient is not None
    gradient.view(-1)[-1] = bad
    assert setting.gradients.collect() != ()
    assert setting.gradients.finite == ()
    setting.wire.checks_finite = False
    gradient.view(-1)[-1] = 0.0
    setting.gradients.collect()
    assert setting.gradients.finite == ()  # nobody has looked


def test_shared_memory_is_staged_by_nobody(slow_side: Any) -> None:
    setting = Setting(slow_side, early_bytes=math.inf)
    setting.backward()
    setting.gradients.collect()
    setting.check()
    assert setting.wire.staged == {}


def test_several_streams_are_followed_before_their_bytes_leave(slow_side: Any) -> None:
    setting = Setting(slow_side)
    followed: list[object] = []
    slow_side.follow = followed.append
    for stream in ("a", "b"):
        slow_side.current = lambda stream=stream: stream
        setting.carrier.carry([])
    assert followed == []
    slow_side.current = lambda: "b"
    setting.carrier.carry([0])
    setting.carrier.finish(set())
    assert set(followed[:2]) == {"a", "b"}


@pytest.mark.parametrize("run_bytes", [64, 400, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_comparison_finds_every_changed_bit(dtype: str, run_bytes: int) -> None:
    segment = segment_of(dtype)
    mirror = torch.zeros(segment.num_bytes, dtype=torch.uint8)
    comparison = Comparison(segment, mirror, run_bytes)
    kind = getattr(torch, dtype)
    gradients = {k: torch.arange(float(p.num_items)).to(kind) for k, p in enumerate(segment.parameters)}
    for k, (parameter, offset) in enumerate(zip(segment.parameters, segment.offsets, strict=True)):
        mirror[offset : offset + parameter.num_bytes] = gradients[k].view(torch.uint8)
    everyone = set(gradients)
    assert comparison.same(gradients) == everyone
    for k, gradient in gradients.items():
        kept = gradient.clone()
        gradient[-1] = -gradient[-1]  # for a zero, only its sign
        assert comparison.same(gradients) == everyone - {k}
        gradient[-1] = float("nan")
        assert comparison.same(gradients) == everyone - {k}
        gradient.copy_(kept)
    assert comparison.same({k: g for k, g in gradients.items() if k != 1}) == everyone - {1}
    gradients[2] = gradients[2].double()
    assert comparison.same(gradients) == everyone - {2}
    assert comparison.same({}) == set()


# -- copied by the CPU ------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Parameters from 16 numbers on have digests, of pieces of 16 numbers; others are compared."""
    monkeypatch.setattr(carriers, "SMALL_BYTES", 64)
    monkeypatch.setattr(finite_module, "PIECE_BYTES", 64)
    return Setting(None)


def edit(setting: Setting, index: int) -> None:
    """One bit of one number, unseen by torch."""
    setting.tensors[index].grad.detach().numpy().view(np.uint32)[-1] ^= 1  # type: ignore[union-attr]


def slices_of(setting: Setting, *indices: int) -> set[int]:
    """Of parameters by the number in their names."""
    places = {int(parameter.name[1:]): k for k, parameter in enumerate(setting.segment.parameters)}
    wanted, slices = {places[index] for index in indices}, setting.segment.slices
    return {part.id for part in slices if wanted & {piece.parameter for piece in setting.segment.pieces(part)}}


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_what_is_edited_after_backward_is_found_and_nothing_else(on_cpu: Setting, index: int) -> None:
    on_cpu.backward()
    assert set(on_cpu.wire.staged) == {part.id for part in on_cpu.segment.slices}
    edit(on_cpu, index)
    assert on_cpu.gradients.collect() == ((0, len(SIZES)),)
    on_cpu.check()
    everything = {part.id for part in on_cpu.segment.slices}
    assert on_cpu.gradients.as_staged == everything - slices_of(on_cpu, index)


@pytest.mark.parametrize("lent", [False, True], ids=["another arena", "written by hand"])
def test_an_arena_that_has_something_else_by_the_step_gets_everything_again(on_cpu: Setting, lent: bool) -> None:
    on_cpu.backward()
    if lent:
        on_cpu.wire.is_arena_shared = True
        on_cpu.wire.arena(0)[:] = 7
    else:
        on_cpu.wire._arena = np.zeros_like(on_cpu.wire._arena)
    on_cpu.gradients.collect()
    on_cpu.check()
    assert not on_cpu.gradients.as_staged


def finite(setting: Setting) -> set[int]:
    """What was found to be so, by the number in its name."""
    parameters, ids = setting.segment.parameters, setting.gradients.finite
    return {int(parameter.name[1:]) for k, parameter in enumerate(parameters) if in_ranges(ids, k)}


def test_what_is_said_to_be_finite_was_looked_at_as_it_is_pushed(on_cpu: Setting) -> None:
    on_cpu.backward()
    on_cpu.gradients.collect()
    found = {
        int(p.name[1:]) for k, p in enumerate(on_cpu.segment.parameters) if in_ranges(on_cpu.gradients.finite, k)
    }
    assert found == {k for k, size in enumerate(SIZES) if size >= 16}
    for tensor in on_cpu.tensors:
        tensor.grad = None
    on_cpu.backward()
    on_cpu.tensors[2].grad.data[5] = float("nan")  # type: ignore[union-attr]
    on_cpu.tensors[0].grad = None
    on_cpu.gradients.collect()
    found = {
        int(p.name[1:]) for k, p in enumerate(on_cpu.segment.parameters) if in_ranges(on_cpu.gradients.finite, k)
    }
    assert found == {k for k, size in enumerate(SIZES) if size >= 16} - {0, 2}


def test_where_messages_have_their_price_a_few_bytes_are_not_told_early(on_cpu: Setting) -> None:
    """The rest goes with the commit; and so it does in the next step, with nothing left over."""
    for factor in (1.0, 2.0):
        on_cpu.wire.early_bytes = 300
        for tensor in on_cpu.tensors:
            tensor.grad = None
        on_cpu.backward(factor=factor)
        told = sum(part.num_bytes for part in on_cpu.segment.slices if part.id in on_cpu.wire.staged)
        assert 300 <= told < on_cpu.segment.num_bytes
        on_cpu.gradients.collect()
        on_cpu.check()
        on_cpu.wire.staged.clear()
    on_cpu.wire.early_bytes = on_cpu.segment.num_bytes + 1
    on_cpu.backward()
    assert not on_cpu.wire.staged and not on_cpu.carrier.helps_early
    on_cpu.gradients.collect()
    on_cpu.check()
