"""What a machine has, and what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.row import Effort, NotMeasured, Row
from benchmarks.rows import all_rows
from syncline.bench import machine

GPU_ROWS = [row for row in all_rows() if row.name.startswith("cuda-")]


def test_gpus_are_named_as_the_driver_names_them(tmp_path: Path):
    for number, name in enumerate(("NVIDIA H200", "NVIDIA A10G")):
        folder = tmp_path / f"0000:0{number}"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 0\n")
    assert machine.gpu_names(str(tmp_path)) == ["NVIDIA H200", "NVIDIA A10G"]
    assert machine.gpu_names(str(tmp_path / "absent")) == []


@pytest.mark.parametrize("row", GPU_ROWS, ids=lambda row: row.name)
def test_rows_on_a_gpu_need_one(row: Row, monkeypatch: pytest.MonkeyPatch, fast: Effort):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotMeasured, match=r"^needs a GPU$"):
        row.measure(fast)


def test_the_rows_on_a_gpu_say_what_they_measure():
    found = {row.name: (str(row.reach), row.what) for row in GPU_ROWS}
    assert (found["cuda-sync"][0], found["cuda-sync-bf16"][0]) == ("≤ 1.3×", "≤ 1.1×")
    assert (found["cuda-async"][0], found["cuda-async-bf16"][0]) == ("≤ 1.1×", "≤ 1.02×")
    assert "bfloat16 batch 64" in found["cuda-async-bf16"][1] and "async --window 1" in found["cuda-async-bf16"][1]
    assert found["cuda-server"][0] == "printed" and found["cuda-server"][1].endswith("sync, --server-device cuda")
