"""The orders of actions, against torch.distributed.pipelining itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as real

from syncline.core.pipelining.schedules import (
    Action,
    Shape,
    actions,
    check_micro_batches,
    check_schedule,
    most_in_flight,
    why_not,
)
from syncline.errors import ConfigError


class RecordingStage:
    """Stands where torch's PipelineStage stands, and writes down what the real schedule asks of it."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = stage, num_stages, num_stages, stage
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.has_backward, self.submod = True, torch.nn.Identity()
        self.device, self.group = torch.device("cpu"), None
        self.made: list[Action] = []

    def get_fwd_recv_ops(self, number: int) -> list[Action]:
        return [] if self.is_first else [Action("RECV_F", self.stage_index, number)]

    def get_fwd_send_ops(self, number: int) -> list[Action]:
        return [] if self.is_last else [Action("SEND_F", self.stage_index, number)]

    def get_bwd_recv_ops(self, number: int) -> list[Action]:
        return [] if self.is_last else [Action("RECV_B", self.stage_index, number)]

    def get_bwd_send_ops(self, number: int) -> list[Action]:
        return [] if self.is_first else [Action("SEND_B", self.stage_index, number)]

    def forward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.made.append(Action("F", self.stage_index, number))

    def backward_one_chunk(self, number: int, **kwargs: Any) -> None:
        self.made.append(Action("B", self.stage_index, number))

    def perform_reduce_grad(self, factor: int) -> None: ...


def recorded(kind: Any, stage: int, num_stages: int, total: int, monkeypatch: pytest.MonkeyPatch) -> list[Action]:
    """What torch's own code of a schedule does for one stage."""
    part = RecordingStage(stage, num_stages)

    def begin(ops: list[Action], desc: str | None = None) -> list[Action]:
        part.made.extend(ops)
        return list(ops)

    def wait(works: list[Action]) -> None:
        if works:
            part.made.append(Action("WAIT", waits=tuple(work.transfer for work in works)))

    monkeypatch.setattr(real, "_batch_p2p", begin)
    monkeypatch.setattr(real, "_sorted_batch_p2p", lambda ops, desc=None: {0: begin(ops)} if ops else {})
    monkeypatch.setattr(real, "_wait_batch_p2p", wait)
    schedule = kind(part, total, loss_fn=None)
    monkeypatch.setattr(schedule, "_initialize_stage", lambda *args, **kwargs: None)
    schedule._step_microbatches([()] * total, [{}] * total)
    return part.made


def merged(program: list[Action]) -> list[Action]:
    """Waits that follow each other are one."""
    found: list[Action] = []
    for action in program:
        if action.kind == "WAIT" and found and found[-1].kind == "WAIT":
            found[-1] = Action("WAIT", waits=(*found[-1].waits, *action.waits))
        else:
            found.append(action)
    return found


@pytest.mark.parametrize(("name", "kind"), [("gpipe", real.ScheduleGPipe), ("1f1b", real.Schedule1F1B)])
@pytest.mark.parametrize(("num_stages", "total"), [(1, 3), (2, 2), (2, 8), (3, 5), (4, 4), (4, 9)])
def test_one_stage_per_worker_in_torchs_order(
    name: str, kind: Any, num_stages: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computations, transfers and waits, action by action."""
    shape = Shape(schedule=name, num_workers=num_stages, num_micro_batches=total)
    for stage in range(num_stages):
        ours = merged(list(actions(shape)[stage]))
        assert ours == merged(recorded(kind, stage, num_stages, total, monkeypatch)), stage


def interleaved_of_torch(workers: int, own: int, total: int, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Any]]:
    monkeypatch.setattr(real.ScheduleInterleaved1F1B, "_validate_and_set_stage_mapping", lambda *args: None, False)
    parts = []
    for place in range(own):
        part = RecordingStage(place * workers, workers * own)
        part.group_size = workers
        part.stage_index_to_group_rank = {stage: stage % workers for stage in range(workers * own)}
        parts.append(part)
    return dict(real.ScheduleInterleaved1F1B(parts, total, loss_fn=None).pipeline_order_with_comms)


@pytest.mark.parametrize(("workers", "own", "total"), [(2, 2, 4), (2, 2, 8), (3, 2, 3), (4, 2, 10), (2, 3, 6)])
def test_interleaved_in_torchs_order(workers: int, own: int, total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lowers the computations to a list with transfers; ours has that list, and the waits besides."""
    shape = Shape(schedule="interleaved", num_workers=workers, num_micro_batches=total, stages_per_worker=own)
    theirs = interleaved_of_torch(workers, own, total, monkeypatch)
    for worker, program in enumerate(actions(shape)):
        ours = [(a.kind, a.stage, a.micro_batch) for a in program if a.kind != "WAIT"]
        expected = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in theirs[worker]]
        assert ours == [each for each in expected if each[0] not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")], worker


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_every_worker_does_each_part_once_and_waits_for_all_that_it_begins(name: str) -> None:
    for workers, total in itertools.product((1, 2, 3, 4), (4, 8, 12)):
        own = 2 if name == "interleaved" else 1
        shape = Shape(schedule=name, num_workers=workers, num_micro_batches=total, stages_per_worker=own)
        if why_not(shape):
            continue
        for worker, program in enumerate(actions(shape)):
            done = [(a.kind, a.stage, a.micro_batch) for a in program if a.kind != "WAIT"]
            assert len(done) == len(set(done))
            stages = range(worker, workers * own, workers)
            assert {each for each in done if each[0] in ("F", "B")} == {
                (kind, stage, number) for kind in ("F", "B") for stage in stages for number in range(total)
            }
            begun = {a.transfer for a in program if a.kind not in ("F", "B", "WAIT")}
            assert begun == {transfer for a in program for transfer in a.waits}


def test_what_is_kept_at_once() -> None:
    def most(name: str, workers: int, total: int, own: int = 1) -> list[tuple[tuple[int, ...], ...]]:
        shape = Shape(schedule=name, num_workers=workers, num_micro_batches=total, stages_per_worker=own)
        return list(most_in_flight(shape))

    assert most("gpipe", 3, 8) == [((8,),)] * 3
    assert most("1f1b", 3, 8) == [((3,),), ((2,),), ((1,),)]
    assert most("1f1b", 3, 3) == [((3,),), ((2,),), ((1,),)]
    assert most("interleaved", 2, 8, 2) == [((3, 2), (4, 1)), ((2, 1), (3, 0))]


@pytest.mark.parametrize(
    ("shape", "batch", "words"),
    [
        (("gpipe", 2, 0), 8, "0 micro-batches: must be 1 or more, or auto"),
        (("gpipe", 2, 16), 8, "a batch of 8 cannot be split into 16 micro-batches"),
        (("gpipe", 2, 3), 8, "cannot be split into 3 equal micro-batches; use --micro-batches 2, or a batch of 9"),
        (("1f1b", 4, 2), 8, "1f1b needs as many micro-batches as stages: 2 are fewer than 4; use another"),
        (("interleaved", 4, 9), 9, "interleaved with 4 workers makes 2 rounds of 9 micro-batches"),
    ],
)
def test_a_batch_that_cannot_be_split_says_what_helps(shape: tuple[str, int, int], batch: int, words: str) -> None:
    name, workers, total = shape
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        check_micro_batches(Shape(schedule=name, num_workers=workers, num_micro_batches=total), batch)


def test_torch_refuses_the_same_numbers_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """`why_not` is torch's own rule: neither more nor less."""
    for workers, total in itertools.product(range(1, 5), range(1, 13)):
        shape = Shape(schedule="1f1b", num_workers=workers, num_micro_batches=total)
        assert bool(why_not(shape)) == _refuses(lambda w=workers, t=total: real.Schedule1F1B(RecordingStage(0, w), t))
        shape = Shape(schedule="interleaved", num_workers=workers, num_micro_batches=total, stages_per_worker=2)
        made = lambda w=workers, t=total: interleaved_of_torch(w, 2, t, monkeypatch)  # noqa: E731
        assert bool(why_not(shape)) == _refuses(made), (workers, total)


def _refuses(make: Any) -> bool:
    try:
        make()
    except ValueError:
        return True
    return False


def test_an_unknown_schedule_is_an_error() -> None:
    with pytest.raises(ConfigError, match="must be one of gpipe, 1f1b, interleaved"):
        check_schedule("zero-bubble")
