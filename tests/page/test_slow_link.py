"""A job over two hosts, network namespaces here, of which one is behind a slow link: its worker is the straggler, and
the cause is the network, not its computing. Over a fast link the same job has no verdict.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.launch.test_namespaces import two_hosts
from tests.page.browsing import opened, wait_until
from tests.patience import JOB_PATIENCE, PATIENCE, PATIENT_TOML

__all__ = ["two_hosts"]

#: Every worker computes for as long, and sends and receives 400 kB in a step.
SCRIPT = """
    import os, time, numpy as np, syncline
    job = syncline.init()
    job.kv.register({"x": np.zeros(100_000, np.float32)}, syncline.Rule("SGD", lr=0.01))
    gradient = np.ones(100_000, np.float32)
    for number in job.steps(MOST_STEPS):
        if os.path.exists("stop"):
            break
        time.sleep(0.1)
        job.kv.push_pull({"x": gradient}).wait()
    job.barrier("end")
    if job.is_chief:
        print("STEPS", number + 1, flush=True)
"""
#: A step's bytes take about 0.3 s in each direction.
SLOW = "10mbit"
TOLD = (
    "worker-2 is the straggler: the others wait for what it sends, and it computes as fast as they do; "
    "the cause is the network"
)
#: Reads this address of the page.
ASKS = """
    import pathlib, sys, urllib.request
    token = pathlib.Path("runs/now/page.token").read_text()
    asked = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {token}"})
    print(urllib.request.urlopen(asked).read().decode())
"""


def inside(host: str, *words: str) -> list[str]:
    return ["ip", "netns", "exec", host, *words]


def slow_down(hosts: tuple[str, str], rate: str) -> None:
    """The wire between them, in each direction."""
    for host in hosts:
        card = f"v{host.removeprefix('syn')}"
        words = f"tc qdisc add dev {card} root tbf rate {rate} burst 64kb latency 200ms".split()
        subprocess.run(inside(host, *words), check=True, capture_output=True)


class SpannedJob:
    """`syncline run` with a server and two workers on the first host, and one worker on the second."""

    def __init__(self, folder: pathlib.Path, hosts: tuple[str, str], most_steps: int) -> None:
        self.folder, self.host = folder, hosts[0]
        (folder / "syncline.toml").write_text(PATIENT_TOML)
        (folder / "train.py").write_text(textwrap.dedent(SCRIPT).replace("MOST_STEPS", str(most_steps)))
        words = [
            "run", "-H", f"{hosts[0]}:2,{hosts[1]}:1", "-s", "1", "--remote", "ip netns exec {host}",
            "--bind", "10.77.0.1", "--name", "now", "--sink", "off", "train.py",
        ]  # fmt: skip
        self.log = folder / "out.txt"
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                inside(self.host, sys.executable, "-m", "syncline", *words), cwd=folder, stdout=out, stderr=out
            )

    def told(self, *words: str) -> str:
        """What a command says on the first host, in one line."""
        done = subprocess.run(
            inside(self.host, sys.executable, "-m", "syncline", *words),
            cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        return " ".join((done.stdout + done.stderr).split())

    def verdicts(self) -> list[str]:
        """Texts of the verdicts so far."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "runs/now/events.jsonl").read_text().splitlines(keepends=True)
            events = [json.loads(line) for line in lines if line.endswith("\n")]
            return [event["text"] for event in events if event["kind"] == "verdict"]
        return []

    def wait_for_verdict(self, words: str) -> None:
        until = time.monotonic() + PATIENCE
        while not any(words in text for text in self.verdicts()):
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            time.sleep(0.2)

    def link(self) -> str:
        found = re.search(r"the page: (http://\S+)", self.log.read_text())
        assert found is not None, self.log.read_text()
        return found[1]

    def page(self, path: str) -> str:
        """What its page answers: it is on the loopback of the first host."""
        words = [sys.executable, "-c", textwrap.dedent(ASKS), f"{self.link().partition('/open')[0]}{path}"]
        done = subprocess.run(
            inside(self.host, *words),
            cwd=self.folder, capture_output=True, text=True, check=True, timeout=PATIENCE,
        )  # fmt: skip
        return done.stdout

    def end(self) -> None:
        (self.folder / "stop").touch()
        try:
            self.process.wait(JOB_PATIENCE)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def running(folder: pathlib.Path, hosts: tuple[str, str], most_steps: int = 10**9) -> Iterator[SpannedJob]:
    job = SpannedJob(folder, hosts, most_steps)
    try:
        yield job
    finally:
        job.end()


@pytest.mark.proof
def test_a_worker_behind_a_slow_link_is_told_in_all_places(
    tmp_path: pathlib.Path, two_hosts: tuple[str, str]
) -> None:
    slow_down(two_hosts, SLOW)
    with running(tmp_path, two_hosts) as job:
        job.wait_for_verdict(TOLD)
        for words in (("why", "now"), ("status", "now")):
            assert TOLD in job.told(*words)
        assert "; straggler" in job.told("ls")
        verdicts = json.loads(job.page("/api/v1/runs/now"))["look"]["verdicts"]
        assert [(one["kind"], one["subject"]) for one in verdicts] == [("straggler", "worker-2")], verdicts
        assert verdicts[0]["advice"] == "see the link of its host; --codec bf16 or --sync-every auto send less"
        assert 'syncline_verdict{kind="straggler",subject="worker-2"} 1.0' in job.page("/metrics")
    assert TOLD in " ".join(job.log.read_text().split()), "syncline run has told it too"


@pytest.mark.proof
def test_over_a_fast_link_the_same_job_has_no_verdict(tmp_path: pathlib.Path, two_hosts: tuple[str, str]) -> None:
    """Thirty seconds and more: all windows are full."""
    with running(tmp_path, two_hosts, most_steps=300) as job:
        assert job.process.wait(JOB_PATIENCE) == 0, job.log.read_text()
        assert job.verdicts() == [] and "STEPS 300" in job.log.read_text(), job.log.read_text()


@pytest.mark.page
def test_the_page_says_so_too(tmp_path: pathlib.Path, two_hosts: tuple[str, str]) -> None:
    """In a browser on the first host."""
    from playwright.sync_api import sync_playwright

    slow_down(two_hosts, SLOW)
    browser_there = tmp_path / "chromium"
    browser_there.write_text(
        f'#!/bin/sh\nexec nsenter --net=/run/netns/{two_hosts[0]} {shutil.which("chromium")} "$@"\n'
    )
    browser_there.chmod(0o700)
    with running(tmp_path, two_hosts) as job, sync_playwright() as playwright:
        job.wait_for_verdict(TOLD)
        browser: Any = playwright.chromium.launch(executable_path=str(browser_there), args=["--no-sandbox"])
        try:
            page, errors = opened(browser, job.link())
            wait_until(page, "document.querySelectorAll('#splits .bar-row').length === 3")
            wait_until(page, f"document.querySelector('#notices').innerText.includes({json.dumps(TOLD)})")
            assert "see the link of its host" in page.locator("#notices").inner_text()
            assert errors == []
        finally:
            browser.close()
