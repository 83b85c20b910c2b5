"""Where a worker computes, by how many GPUs there are and who else is here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from syncline.core.members import Member
from syncline.worker.job import choose_device


@pytest.mark.parametrize(
    ("gpus", "here", "local_rank", "device"),
    [(0, 2, 1, "cpu"), (2, 2, 1, "cuda:1"), (1, 2, 0, "cpu"), (1, 1, 0, "cuda:0"), (1, 1, 3, "cpu")],
)
def test_a_gpu_of_its_own_or_none(
    gpus: int, here: int, local_rank: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last: three others have finished, which keep their ranks; there is no fourth GPU."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: gpus)))
    members = [Member(f"worker-{k}", "worker", k + 1, "a") for k in range(here)]
    members += [Member("worker-9", "worker", 9, "b"), Member("server-0", "server", 8, "a")]
    assert choose_device("auto", members, "a", local_rank) == device
