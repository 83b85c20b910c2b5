"""Loaders of a job, and how they are told apart: by their order, by name, in one job after the other."""

from __future__ import annotations

import pytest
from tests.leased import LeaseQueue, alone, order
from tests.torch.test_data import Numbers, flat, train

import syncline.torch.data
from syncline.errors import ConfigError
from syncline.torch.data import DataLoader


def test_loaders_are_known_by_their_order_or_by_name() -> None:
    job = alone()
    loaders = [DataLoader(Numbers(4), 2, job=job, name=name) for name in ("", "labelled", "")]
    for loader in loaders:
        train(loader, job)
    assert set(job.lease_queue.leasing.state.loaders) == {"loader-0", "labelled", "loader-1"}
    with pytest.raises(ConfigError, match="two loaders called 'labelled'; give each its own name="):
        DataLoader(Numbers(4), 2, job=job, name="labelled")


def test_loaders_made_before_the_job_are_known_by_the_order_in_which_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers may read them in different order (a chief that evaluates first); one that is gone was counted too."""
    monkeypatch.setattr(syncline.torch.data, "made_before", [])
    first, second = DataLoader(Numbers(4), 2), DataLoader(Numbers(6), 2)
    DataLoader(Numbers(5), 2)
    third, named = DataLoader(Numbers(8), 2), DataLoader(Numbers(9), 2, name="named")
    job = alone()
    monkeypatch.setattr(syncline.torch.data, "current_job", lambda: job)
    monkeypatch.setattr(syncline.torch.data, "has_current_job", lambda: True)
    for loader in (DataLoader(Numbers(10), 2), third, named, second, first):
        train(loader, job)
    lengths = {name: loader.num_samples for name, loader in job.lease_queue.leasing.state.loaders.items()}
    assert lengths == {"loader-0": 4, "loader-1": 6, "loader-3": 8, "loader-4": 10, "named": 9}


def test_data_of_different_length_is_refused_with_both_named() -> None:
    lease_queue = LeaseQueue(2)
    iter(DataLoader(Numbers(8), 2, job=lease_queue[0]))
    with pytest.raises(ConfigError, match=r"worker-1 has 9 samples in batches of 2 .*worker-0 has 8 samples"):
        iter(DataLoader(Numbers(9), 2, job=lease_queue[1]))


def test_the_current_job_is_taken_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for at iter() only: a loader may be made before init(), and read in one job after the other."""
    loader = DataLoader(Numbers(8), 2, True)
    for _ in range(2):
        job = alone()
        monkeypatch.setattr(syncline.torch.data, "current_job", lambda job=job: job)
        assert flat(train(loader, job)) == order(8, 0, 0)
