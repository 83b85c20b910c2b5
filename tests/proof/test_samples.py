"""`make proof`: every sample counts exactly once in every epoch, while members are killed and come back."""

from __future__ import annotations

import pathlib

import pytest
from tests.proof.chaotic import play

RUNS = [
    *(("sync", seed) for seed in range(3)),
    *(("sync:spare=1", seed) for seed in range(3, 5)),
    *(("bounded:2", seed) for seed in range(5, 7)),
    ("bounded:2,damped", 7),
    *(("async", seed) for seed in range(8, 10)),
]


@pytest.mark.proof
@pytest.mark.parametrize(("policy", "seed"), RUNS)
def test_every_sample_counts_once_in_every_epoch(policy: str, seed: int, tmp_path: pathlib.Path) -> None:
    """Ten real runs; three epochs each, of four workers and two servers."""
    lost, doubled, kills = play(tmp_path, policy, seed=seed, samples=6000, every="2s")
    print(f"{policy}, seed {seed}: {lost} lost, {doubled} doubled, {kills} kills")
    assert (lost, doubled) == (0, 0)
    assert kills >= 2


#: policy and frequencies; also over sockets
FREQUENCIES = [
    ("async", ["--sync-every", "3"]),
    ("async", ["--sync-every", "3", "--transport", "tcp"]),
    ("bounded:2", ["--sync-every", "auto"]),
    ("bounded:2", ["--pull-every", "4"]),
    ("async", ["--pull-every", "4", "--transport", "tcp"]),
]


@pytest.mark.proof
@pytest.mark.parametrize(("policy", "options"), FREQUENCIES, ids=str)
def test_every_sample_of_local_steps_counts_once(policy: str, options: list[str], tmp_path: pathlib.Path) -> None:
    """Local steps die with their worker when they are in no push yet: their samples are read again."""
    seed = FREQUENCIES.index((policy, options))
    lost, doubled, kills = play(
        tmp_path, policy, seed=seed, samples=6000, every="2s", options=options, arguments=["--optimizer"]
    )
    print(f"{policy} {' '.join(options)}: {lost} lost, {doubled} doubled, {kills} kills")
    assert (lost, doubled) == (0, 0)
    assert kills >= 2
