"""The seam between the launcher and the place where members run: the five verbs, on real processes."""

from __future__ import annotations

import signal
import sys
import time

import pytest
from tests.patience import PATIENCE

from syncline import config as configuration
from syncline.errors import ConfigError
from syncline.launch import jobfile
from syncline.launch.engine import Attended, Engine, Prefixes, Processes
from syncline.launch.processes import MemberPlan, MemberProcess
from syncline.launch.running import engine_of

#: A command prefix like ssh's: it takes the host, and starts the rest as it is.
PREFIX = f"{sys.executable} -c 'import os, sys; os.execvp(sys.argv[2], sys.argv[2:])' {{host}}"
FILE = jobfile.new("127.0.0.1", 9, {"start_seconds": 1.0})


def plan(host: str) -> MemberPlan:
    """A server whose coordinator is not there: it waits for it."""
    return MemberPlan(role="server", name="server-0", host=host, file=FILE)


def ended(engine: Engine, process: MemberProcess) -> int:
    until = time.monotonic() + PATIENCE
    while (code := engine.watch(process)) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.stop(0.0)
    return code


@pytest.mark.parametrize(
    ("engine", "host"),
    [(Processes(), "local"), (Prefixes(["a", "b"], PREFIX), "a")],
    ids=["processes", "prefixes"],
)
def test_a_member_starts_is_watched_and_stopped(engine: Engine, host: str) -> None:
    process = engine.start(plan(host))
    assert engine.watch(process) is None
    engine.stop(process, signal.SIGKILL)
    assert ended(engine, process) == -signal.SIGKILL


def test_the_engine_follows_from_the_hosts() -> None:
    here, there = (engine_of(configuration.resolve({"hosts": hosts}), None) for hosts in ("", "b:1,a:2"))
    assert (here.describe(), there.describe()) == ("", "a, b")
    where = {"worker-0": "a", "worker-1": "b", "worker-2": "a"}
    assert (here.scale("worker", where), there.scale("worker", where)) == ("local", "b")


def test_a_prefix_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"server-0 on a cannot be started: no-such-prefix a .*No such file"):
        Prefixes(["a"], "no-such-prefix {host}").start(plan("a"))


def test_an_attended_engine_starts_members_by_other_means_and_leaves_the_rest() -> None:
    seen: list[str] = []

    def start(engine: Engine, plan: MemberPlan) -> MemberProcess:
        seen.append(plan.name)
        return engine.start(plan)

    engine = Attended(Prefixes(["a", "b"], PREFIX), start)
    process = engine.start(plan("b"))
    engine.stop(process, signal.SIGKILL)
    assert ended(engine, process) == -signal.SIGKILL and seen == ["server-0"]
    assert engine.describe() == "a, b" and engine.scale("worker", {"worker-0": "a"}) == "b"
