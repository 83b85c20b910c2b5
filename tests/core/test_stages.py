"""Pipelines in the settings: numbers of workers, micro-batches, and what cannot be combined."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.config import resolve
from syncline.core.settings import check_settings
from syncline.core.stages import num_micro_batches, num_parts, wanted_micro_batches
from syncline.errors import ConfigError
from syncline.launch.hosts import settle_stages


def test_numbers_of_workers_become_numbers_of_pipelines() -> None:
    assert settle_stages({"workers": 6, "stages": 3}) == {"workers": 2, "stages": 3}
    assert settle_stages({"workers": 0, "least_workers": 2, "most_workers": 8, "stages": 2})["most_workers"] == 4
    assert settle_stages({"hosts": "a:4,b:2", "stages": 2})["hosts"] == "a:2,b:1"
    assert settle_stages({"workers": 5}) == {"workers": 5}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"workers": 3, "stages": 2}, "-w 3 is not divisible by --stages 2: .* use -w 2"),
        ({"workers": 1, "stages": 2}, "use -w 2"),
        ({"hosts": "a:4,b:3", "stages": 2}, "b:3 is not divisible by 2"),
    ],
)
def test_workers_that_make_no_whole_pipelines_are_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settle_stages(said)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"schedule": "zigzag"}, "must be one of gpipe, 1f1b, interleaved"),
        ({"stages": 2, "sync_every": 4}, "--sync-every cannot be combined"),
        ({"stages": 2, "device": "cuda:0"}, "stages compute on CPUs"),
        ({"stages": 2, "server_device": "cuda"}, "needs servers on CPUs"),
        ({"stages": 0}, "--stages auto is planned by syncline run; give a number here"),
    ],
)
def test_what_cannot_be_combined(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_settings(resolve(said))


def test_batches_are_cut_into_equal_parts() -> None:
    assert [num_micro_batches(size, 8) for size in (64, 12, 7, 3, 1)] == [8, 6, 7, 3, 1]
    assert num_micro_batches(13, 8) == 1


def test_what_follows_from_the_number_of_stages() -> None:
    assert wanted_micro_batches(resolve({})) == 1 and num_parts(resolve({"schedule": "interleaved"})) == 1
    assert wanted_micro_batches(resolve({"stages": 2})) == 8
    assert wanted_micro_batches(resolve({"stages": 2, "micro_batches": 3})) == 3
    assert (
        num_parts(resolve({"stages": 2})) == 2 and num_parts(resolve({"stages": 2, "schedule": "interleaved"})) == 4
    )
