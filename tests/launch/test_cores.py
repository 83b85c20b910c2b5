"""`--cores auto`: where there are too few cores for all, one member of each host says who shares them, and why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from syncline import config as configuration
from syncline.launch import jobfile
from syncline.launch.member import keep_to_own_cores
from syncline.launch.running import Plans, Script, engine_of


def plans(**settings: Any) -> Plans:
    config = configuration.resolve({"cores": "auto", **settings})
    return Plans(jobfile.new("127.0.0.1", 1, {}), config, Script(path="train.py"), 0, engine_of(config, None))


@pytest.mark.parametrize(
    ("cores", "said"),
    [
        (2, ["syncline: server-0: host local: --cores auto: 2 cores for 1 server and 3 workers: too few for each to "
             "have its own, so all share them\n"]),
        (4, []),
    ],
)  # fmt: skip
def test_one_of_them_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cores: int, said: list[str]
) -> None:
    kept: list[list[int]] = []
    monkeypatch.setattr(configuration, "cores_here", lambda: list(range(cores)))
    monkeypatch.setattr(configuration, "keep_to_cores", lambda own: kept.append(own) or bool(own))
    found = [plan for plan in plans(workers=3, servers=1).first() if plan.role != "coordinator"]
    assert [keep_to_own_cores(plan) for plan in found] == [cores == 4] * 4
    assert capsys.readouterr().err.splitlines(keepends=True) == said
    assert kept == ([[0], [1], [2], [3]] if cores == 4 else [[]] * 4)


def test_one_of_each_host_and_whoever_comes_later() -> None:
    some = plans(workers=4, servers=2, hosts="a:2,b:2")
    first = some.first()
    assert [plan.name for plan in first if plan.tells_cores] == ["server-0", "server-1"]
    later = some.another("worker-4", {plan.name: plan.host for plan in first if plan.role != "coordinator"})
    assert later.tells_cores and later.place == (3, 1, 3)


def test_one_that_starts_again_has_said_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "cores_here", lambda: [0])
    server = plans(workers=1, servers=1).first()[1]
    keep_to_own_cores(msgspec.structs.replace(server, starts_again=True))
    assert capsys.readouterr().err == ""
