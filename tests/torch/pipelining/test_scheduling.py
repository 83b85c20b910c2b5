"""The scheduler of a running pipeline: it knows the memory and the exchange, as `--stages auto` does."""

from __future__ import annotations

import resource
import types
from typing import Any

import pytest
import torch

from syncline.config import JobConfig
from syncline.core.pipelining.costs import LayerCosts, MeasuredBatch, ModelCosts
from syncline.net import shm
from syncline.torch.pipelining import profile, scheduling
from syncline.torch.pipelining.scheduling import StageScheduler

MIB = 1 << 20


class Leader:
    """A pipeline of two processes that is cut in the middle."""

    firsts = (0, 2)
    num_samples, busy_seconds = 0, (0.0, 0.0)
    shared_bytes = 16 * MIB

    def __init__(self) -> None:
        self.cuts: list[tuple[int, ...]] = []

    def cut(self, firsts: Any) -> bool:
        self.cuts.append(tuple(firsts))
        return True


class Planned:
    """A first batch of a model: the first layer takes long, the three others have the parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, local_workers: int = 1, hosts: int = 1) -> None:
        seconds = (3e-3, 1e-3, 1e-3, 1e-3)
        layers = tuple(
            LayerCosts(
                name=f"{number}",
                forward_seconds=each,
                backward_seconds=each,
                parameter_bytes=(4 if number else 1) * MIB,
            )
            for number, each in enumerate(seconds)
        )
        costs = ModelCosts(measured=(MeasuredBatch(num_samples=2, layers=layers),))
        monkeypatch.setattr(profile, "profile_model", lambda *_, **__: costs)
        self.leader, self.said = Leader(), list[str]()
        job = types.SimpleNamespace(
            name="worker-0",
            config=JobConfig(stages=2),
            stages=types.SimpleNamespace(num_processes=2),
            world_size=local_workers,
            num_local_workers=local_workers,
            num_hosts=hosts,
            notice=lambda text, **_: self.said.append(text),
        )
        names = ["0", "1", "2", "3"]
        model = types.SimpleNamespace(names=names, cut_before=(), model=None, given=())
        self.scheduler = StageScheduler(job, model, torch.nn.functional.mse_loss, self.leader)  # type: ignore[arg-type]

    def look(self) -> str:
        self.scheduler.look([torch.zeros(8, 1)], torch.zeros(8, 1), 4)
        (text,) = self.said
        return text


def test_without_a_limit_the_plan_goes_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "bytes_for_each", lambda *_: 0)
    planned = Planned(monkeypatch)
    assert "cut before 1 (1 + 3 of 4 layers)" in planned.look()
    assert planned.leader.cuts == [(0, 1)]


def test_the_plan_of_a_job_keeps_to_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By time 12 MiB of parameters are in one process, with gradients and a copy 36. It has 30: another cut is made,
    as `--stages auto` would make it.
    """
    monkeypatch.setattr(scheduling, "bytes_for_each", lambda *_: 30 * MIB)
    planned = Planned(monkeypatch)
    assert "(2 + 2 of 4 layers)" in planned.look()
    assert planned.leader.cuts == []  # it is cut there already
    assert planned.scheduler.plan is not None
    assert max(stage.memory_bytes for stage in planned.scheduler.plan.stages) <= 30 * MIB


def test_a_model_that_fits_nowhere_stays_cut_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "bytes_for_each", lambda *_: MIB)
    planned = Planned(monkeypatch)
    assert "no plan could be made (ConfigError: layer '1' alone needs" in planned.look()
    assert planned.leader.cuts == []


def test_memory_is_that_of_the_host_and_what_its_pipelines_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipelines of two processes: 100 MiB are left, and 16 are in each pipeline."""
    asked = list[tuple[int, int]]()
    monkeypatch.setattr(scheduling, "bytes_for_each", lambda *args: asked.append(args) or 0)
    Planned(monkeypatch, local_workers=2).look()
    assert asked == [(4, 32 * MIB)]
    monkeypatch.setattr(shm, "available_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert shm.bytes_for_each(*asked[0]) == 33 * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20 * MIB, resource.RLIM_INFINITY))
    assert shm.bytes_for_each(*asked[0]) == 20 * MIB


def test_a_predicted_step_has_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 MiB of gradients go to the servers, and 13 MiB of parameters come back, of every pipeline, by one way."""
    monkeypatch.setattr(scheduling, "bytes_for_each", lambda *_: 0)
    found = {}
    for pipelines, hosts in ((1, 1), (2, 1), (1, 2)):
        planned = Planned(monkeypatch, local_workers=pipelines, hosts=hosts)
        planned.look()
        assert planned.scheduler.plan is not None
        found[pipelines, hosts] = planned.scheduler.plan.exchange_seconds
    assert found[1, 1] == pytest.approx(1e-3 + 26 * MIB / 2e9)
    assert found[2, 1] == pytest.approx(1e-3 + 52 * MIB / 2e9)
    assert found[1, 2] == pytest.approx(2e-3 + 26 * MIB / 1.25e8)
