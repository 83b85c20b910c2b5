"""`syncline trace`: the trace of a real job against the job's own figures, and what people type wrongly."""

from __future__ import annotations

import gzip
import json
import math
import pathlib
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest
from tests import forked
from tests.core.test_tracing import check_nesting, step
from tests.patience import JOB_PATIENCE, PATIENT_TOML
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.core.tracing import TracedBatch
from syncline.store.lines import SPANS, Lines, LinesWriter
from syncline.store.spans import read_lives

SCRIPT = """
    import pathlib, numpy as np, msgspec, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(1000)}, syncline.Rule("SGD", lr=1.0))
    for _ in job.steps(40):
        job.kv.push_pull({"x": np.ones(1000)})
    times = job.exchange.times.times()
    pathlib.Path(f"{job.name}.json").write_bytes(msgspec.json.encode(times))
"""
PHASES = ("compute", "stage", "wait", "pull")


def run(folder: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-m", "syncline", *words], cwd=folder, capture_output=True, text=True, timeout=JOB_PATIENCE
    )


def spans_of(trace: Any, pid: int, name: str) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid and e["name"] == name]


def check_against_the_run(folder: pathlib.Path, trace: Any, workers: list[str], num_steps: int) -> None:
    """Lanes, nesting, steps, sums and clocks."""
    events = trace["traceEvents"]
    check_nesting(events)
    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(pids) == [*workers, "server-0"]
    assert all({e["tid"] for e in events if e["ph"] == "X" and e["pid"] == pid} == {1} for pid in pids.values())
    errors = {
        e["pid"]: float(e["args"]["labels"].partition("±")[2].removesuffix(" ms")) * 1e3
        for e in events
        if e["name"] == "process_labels"
    }
    applied = {e["args"]["step"]: e for e in spans_of(trace, pids["server-0"], "apply")}
    assert list(applied) == list(range(1, num_steps + 1))
    for name in workers:
        pid = pids[name]
        whole = [e for e in events if e["ph"] == "X" and e["pid"] == pid and e["cat"] == "step"]
        assert [e["args"]["step"] for e in whole] == list(range(1, num_steps + 1))
        times = json.loads((folder / f"{name}.json").read_text())
        for phase in PHASES:
            told = sum(e["dur"] for e in spans_of(trace, pid, phase)) / 1e6
            # The script looks at its times before the job ends: what it does after that is in the trace too.
            most = times[phase] + 1e-4 if phase not in ("compute", "wait") else math.inf
            assert times[phase] - 1e-3 <= told <= most, (name, phase)
        slack = errors[pid] + errors[pids["server-0"]] + 1_000
        for around in whole:  # the round is applied between the worker's push and its new parameters
            round_, end = applied[around["args"]["step"]], around["ts"] + around["dur"]
            assert around["ts"] - slack <= round_["ts"] <= round_["ts"] + round_["dur"] <= end + slack


def test_the_trace_of_a_job(tmp_path: pathlib.Path) -> None:
    """Two workers and a server; every step of each is in its lane, at its time. Without --trace there is none."""
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    made = run(tmp_path, "run", "-w", "2", "--trace", "--page", "off", "--name", "traced", "train.py")
    assert made.returncode == 0, made.stderr
    told = CliRunner().invoke(app, ["trace", "traced", "--runs", str(tmp_path / "runs")])
    assert told.exit_code == 0 and "3 members" in told.stdout, told.output
    trace = json.loads((tmp_path / "runs/traced/trace.json").read_text())
    check_against_the_run(tmp_path, trace, ["worker-0", "worker-1"], 40)
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "i"]


@pytest.mark.proof
def test_a_host_with_another_clock(tmp_path: pathlib.Path) -> None:
    """worker-1 is on a "host" that has been up for 5,000 s longer: a time namespace of the kernel."""
    ahead = ["unshare", "--user", "--map-root-user", "--time", "--fork", "--kill-child", "--monotonic", "5000"]
    if subprocess.run([*ahead, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system has no time namespaces for us")
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    own, job = [sys.executable, "-m", "syncline"], tmp_path / "job.json"
    said = ["--trace", "--page", "off", "-w", "2", "--name", "two"]
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        started.append(subprocess.Popen([*words, "--job", str(job), *more], cwd=tmp_path))

    try:
        more = said
        start(*own, "coordinator")
        until = time.monotonic() + JOB_PATIENCE
        while not job.exists() and time.monotonic() < until:
            time.sleep(0.05)
        more = []
        start(*own, "server")
        more = ["--name", "worker-0", "train.py"]
        start(*own, "worker")
        more = ["--name", "worker-1", "train.py"]
        start(*ahead, *own, "worker")
        assert [process.wait(JOB_PATIENCE) for process in started] == [0, 0, 0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    lives, damage = read_lives(tmp_path / "runs" / "two")
    assert not damage and [life.member for life in lives] == ["worker-0", "worker-1", "server-0"]
    # By their own clocks they were more than an hour apart: else this test has proved nothing.
    firsts = [min(span.begin for span in one.spans) for one in _first_batches(tmp_path / "runs" / "two")]
    assert max(firsts) - min(firsts) > 4_000e6
    told = CliRunner().invoke(app, ["trace", "two", "--runs", str(tmp_path / "runs")])
    assert told.exit_code == 0, told.output
    trace = json.loads((tmp_path / "runs/two/trace.json").read_text())
    check_against_the_run(tmp_path, trace, ["worker-0", "worker-1"], 40)


def _first_batches(folder: pathlib.Path) -> list[TracedBatch]:
    found: dict[str, TracedBatch] = {}
    for one in Lines(folder / SPANS, TracedBatch):
        if one.spans:
            found.setdefault(one.member, one)
    return list(found.values())


def lines(folder: pathlib.Path, *batches: TracedBatch) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = LinesWriter(folder / SPANS, 1 << 20)
    writer.write(batches)
    writer.close()
    return folder / SPANS


def batch(number: int) -> TracedBatch:
    return TracedBatch(
        member="worker-0", role="worker", incarnation=1, number=number, received=1e9, sent=0, dropped=3,
        spans=step(number, 1_000 * number),
    )  # fmt: skip


def invoke(*words: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["trace", *words])
    error = str(found.exception) if found.exception is not None else ""
    return found.exit_code, found.stdout, error


def test_what_people_type_wrongly(tmp_path: pathlib.Path) -> None:
    runs = tmp_path / "runs"
    lines(runs / "one", batch(1))
    (runs / "no run").mkdir()
    (runs / "untraced").mkdir()
    (runs / "untraced" / "events.jsonl").touch()
    said = ["--runs", str(runs)]
    assert "there is no run two under" in invoke("two", *said)[2]
    assert "is a folder, but no run" in invoke("no run", *said)[2]
    assert "start it with syncline run --trace" in invoke("untraced", *said)[2]
    for steps in ("5", "x:y", "9:2", ":" * 3, "1e3:"):
        assert "--steps" in invoke("one", "--steps", steps, *said)[2], steps
    assert "cannot be written" in invoke("one", "-o", str(tmp_path / "none" / "t.json"), *said)[2]
    assert "none of its spans" in invoke("one", "--steps", "7:", *said)[1]


def test_a_damaged_file_is_shown_up_to_the_damage(tmp_path: pathlib.Path) -> None:
    path = lines(tmp_path / "runs" / "one", batch(1), batch(2), batch(3))
    text = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(text[0] + b'{"member": 7}\n' + text[2])
    out = tmp_path / "t.json.gz"
    code, told, _ = invoke("one", "-o", str(out), "--runs", str(tmp_path / "runs"))
    assert code == 0 and "damaged: spans.jsonl, line 2" in told and "3 spans came faster" in told
    names = [e["name"] for e in json.loads(gzip.decompress(out.read_bytes()))["traceEvents"] if e["ph"] == "X"]
    assert names.count("step 1") == 1 and "step 3" not in names
    path.write_bytes(b"\xff\xfe\n")
    assert "its spans are damaged: spans.jsonl, line 1" in invoke("one", "--runs", str(tmp_path / "runs"))[2]
