"""Collectives between real processes: in shared memory handed over by descriptors, and over TCP."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.launch.conftest import Commands
from tests.patience import PATIENCE

VERBS = """
    import numpy as np
    import syncline
    from syncline import collectives
    job = syncline.init()
    me, count = job.rank, job.world_size
    for size in (5, 100_003):
        x = np.arange(size, dtype=np.float32) + me
        total = collectives.all_reduce(x)
        assert np.array_equal(total, count * np.arange(size, dtype=np.float32) + sum(range(count)))
        shared = collectives.empty(size)
        for turn in range(3):
            shared[:] = me + turn
            collectives.all_reduce_(shared, "max")
            assert (shared == count - 1 + turn).all()
        assert np.array_equal(collectives.all_gather(np.full((me + 1, size), me)),
                              np.concatenate([np.full((k + 1, size), k) for k in range(count)]))
        collectives.send(x, to=1) if me == 0 else None
        assert me != 1 or np.array_equal(collectives.recv(0), np.arange(size))
        try:
            collectives.all_reduce(x[: size - me])
        except syncline.CollectiveError as error:
            print("TOLD", size, error)
        del shared
    tickets = [collectives.all_reduce_(np.ones(50_000), wait=False) for _ in range(3)]
    assert all((ticket.wait(300.0) == count).all() for ticket in tickets)
    collectives.barrier()
    print("BYTES", job.collectives.stats().bytes_sent > 1_000_000)
"""

DEATH = """
    import pathlib, time
    if me == 2:
        print("ALONE", flush=True)
        time.sleep(600)
    try:
        collectives.all_reduce(np.ones(1_000_000))
    except syncline.CollectiveError as error:
        pathlib.Path(f"told-{me}").write_text(str(error))
"""

#: Each step adds 1 to the first number; and to the second only when the next life of worker-1 takes part.
AVERAGING = """
    import os, pathlib
    import numpy as np
    import syncline
    from syncline import collectives
    job = syncline.init()
    is_next_life = pathlib.Path("died").exists()
    mine, state, step = np.array([1.0, float(is_next_life)]), np.zeros(2), 0

    def tell(error):
        print("TOLD", str(error).partition(";")[0], flush=True)

    if is_next_life:
        try:
            print("WRONG", collectives.all_reduce(mine, "average"))
        except syncline.CollectiveError as error:
            tell(error)
    while True:
        try:
            step = collectives.restart(step, [state])
            while state[1] < 1:
                if job.name == "worker-1" and not is_next_life and step == 20:
                    pathlib.Path("died").touch()
                    os.kill(os.getpid(), 9)
                state += collectives.all_reduce(mine, "average")
                step += 1
            collectives.barrier()
            break
        except syncline.CollectiveError as error:
            tell(error)
    print("FINAL", step, round(state[0], 3), round(state[1], 3))
"""


@pytest.fixture
def commands(tmp_path: Any) -> Iterator[Commands]:
    made = Commands(tmp_path.resolve())
    yield made
    made.close()


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.proof)])
def test_every_way(commands: Commands, transport: str) -> None:
    """Right results, the same error at all ranks; in shared memory no data go over sockets. Then one is killed while
    the others wait for it, and they are told. The launcher stands still meanwhile: it ends them else, however far
    they are."""
    script = commands.script(VERBS + DEATH)
    process = commands.start("run", "-w", "3", "-s", "1", "--max-restarts", "0", "--transport", transport, script)
    commands.wait_for("ALONE", "worker-2")
    for rank in range(2):
        commands.wait_for("BYTES", f"worker-{rank}")
    process.send_signal(signal.SIGSTOP)
    os.kill(commands.members()["worker-2"], signal.SIGKILL)
    for rank in range(2):
        told = _written(commands.folder / f"told-{rank}")
        assert told.startswith("worker-2 is gone while all_reduce of float64[1000000] was under way"), told
    process.send_signal(signal.SIGCONT)
    output = commands.finish(process).output
    for size in (5, 100_003):
        told = (
            f"TOLD {size} worker-2 called all_reduce of float32[{size - 2}], worker-1 of float32[{size - 1}], "
            f"worker-0 of float32[{size}]"
        )
        assert output.count(told) == 3, output
    assert output.count(f"BYTES {transport == 'tcp'}") == 3, output


def test_a_worker_that_is_killed_and_starts_again(commands: Commands) -> None:
    """Its script begins at the top: its first call, which looks like all others, meets none of them. All three get
    the same error, and go on from the survivors' state."""
    result = commands.run("run", "-w", "3", "-s", "1", commands.script(AVERAGING))
    assert result.code == 0 and "WRONG" not in result.output, result.output
    logs = {name: commands.wait_for("FINAL", name) for name in ("worker-0", "worker-1", "worker-2")}
    told = re.findall(r"TOLD (worker-1 began its script after .*)", logs["worker-1"])
    assert len(told) == 1 and all(told[0] in log for log in logs.values()), result.output
    (final,) = {re.findall(r"FINAL (\d+) (\S+) (\S+)", log)[0] for log in logs.values()}
    assert int(final[0]) > 20 and float(final[0]) == float(final[1]), final


def _written(path: pathlib.Path) -> str:
    """What a worker writes there, once it has."""
    deadline = time.monotonic() + PATIENCE
    while not (path.exists() and (text := path.read_text())):
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return text
