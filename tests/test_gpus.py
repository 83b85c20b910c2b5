"""How busy GPUs are, from a library that answers as NVIDIA's does. The real one is where its driver is."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
from tests.patience import PATIENCE

from syncline.gpus import GpuMeter, busy_of
from syncline.stats import MemberFigures
from syncline.top.rows import facts

#: Two GPUs: one is busy for 80 per cent of the time, one is cut in parts and does not tell.
SOURCE = """
#include <string.h>
static int busy = 80, first, second;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *id, void **handle) {
    *handle = strcmp(id, "GPU-aa") ? &second : &first;
    return strcmp(id, "GPU-aa") && strcmp(id, "GPU-bb") ? 6 : 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    if (handle == &second) return 3;
    rates[0] = busy; rates[1] = 7; return 0;
}
void make_busy(int value) { busy = value; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder: pathlib.Path = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "nvml.so", folder / "nvml.c"], check=True)
    return ctypes.CDLL(str(folder / "nvml.so"))


def test_the_mean_is_over_the_gpus_that_tell_it(library: ctypes.CDLL) -> None:
    library.make_busy(80)
    assert busy_of(library, ["aa", "bb"]) == 0.8
    assert busy_of(library, ["aa", "aa", "none"]) == 0.8
    assert busy_of(library, ["bb", "none"]) is None and busy_of(library, []) is None


def wait_for(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_it_is_asked_again_and_nobody_waits_for_it(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.gpus.EVERY_SECONDS", 0.01)
    library.make_busy(50)
    may_load = threading.Event()

    def load() -> ctypes.CDLL:
        may_load.wait()
        return library

    meter = GpuMeter(load)
    try:
        assert meter.busy(["aa"]) is None, "the driver has not answered yet"
        may_load.set()
        for expected in (50, 90):
            library.make_busy(expected)
            wait_for(lambda expected=expected: meter.busy(["aa"]) == expected / 100)
        wait_for(lambda: meter.busy(["bb"]) is None)
    finally:
        meter.close()


def test_without_a_driver_nothing_is_known() -> None:
    def missing() -> ctypes.CDLL:
        return ctypes.CDLL("libnvidia-ml-of-nobody.so.1")

    meter = GpuMeter(missing)
    assert meter.busy(["aa"]) is None
    meter.close()
    assert meter.busy(["aa"]) is None


def test_one_member_is_described_with_its_gpus() -> None:
    busy, unknown, none = (
        " ".join(facts(MemberFigures(name="worker-0", role="worker", gpu_bytes=size, gpu_busy=part)))
        for size, part in ((3 * 10**9, 0.9), (10**9, None), (0, None))
    )
    assert "on GPUs, which are busy 90% of the time;" in busy
    assert "on GPUs;" in unknown and "busy" not in unknown and "GPU" not in none
