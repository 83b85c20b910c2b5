"""`for epoch in loader.epochs(n)`: no epoch that is finished, none without a batch; passes keep their numbers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.leased import FakeJob, LeaseQueue, alone, order
from tests.patience import PATIENCE
from tests.torch.test_data import Numbers, flat, train

from syncline.errors import ConfigError
from syncline.torch.data import DataLoader
from syncline.worker.data.samples import WorkerSamples


def run(loader: DataLoader[Any], job: FakeJob, num_epochs: int) -> dict[int, list[int]]:
    return {epoch: flat(train(loader, job)) for epoch in loader.epochs(num_epochs)}


def test_every_epoch_is_given_once_in_its_own_order() -> None:
    job = alone()
    assert run(DataLoader(Numbers(8), 2, True, job=job, seed=0), job, 3) == {n: order(8, 0, n) for n in range(3)}


def test_a_worker_that_starts_again_gets_the_epochs_that_are_left_in_their_order() -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    first = DataLoader(Numbers(8), 2, True, job=lease_queue[0], seed=0)
    for _ in range(2):
        train(first, lease_queue[0])
    again = DataLoader(Numbers(8), 2, True, job=lease_queue[1], seed=0)
    assert run(again, lease_queue[1], 4) == {2: order(8, 0, 2), 3: order(8, 0, 3)}
    assert lease_queue[1].samples.num_skipped == 2 and lease_queue[1].noticed == []


def test_an_epoch_whose_rest_others_have_is_not_given() -> None:
    """It is under way when the worker comes, and there is nothing in it for it: the wait for its end is here."""
    lease_queue = LeaseQueue(2, in_rounds=False)
    loader, coming = (
        DataLoader(Numbers(2), 2, True, job=lease_queue[0], seed=0),
        DataLoader(Numbers(2), 2, True, job=lease_queue[1], seed=0),
    )
    batches, found, waits = iter(loader), [], threading.Event()
    next(batches)

    def come() -> None:
        waits.set()
        found.extend(coming.epochs(1))

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    assert waits.wait(PATIENCE)
    thread.join(0.2)
    assert thread.is_alive(), "the epoch is not over"
    lease_queue[0].step()
    assert list(batches) == []
    thread.join(PATIENCE)
    assert found == [] and not thread.is_alive()


def test_what_it_holds_for_an_epoch_goes_back_when_the_script_leaves() -> None:
    job = alone()
    loader = DataLoader(Numbers(8), 2, job=job)
    epochs = loader.epochs(2)
    assert next(epochs) == 0
    epochs.close()  # type: ignore[attr-defined]
    assert job.lease_queue.left == 8 and job.lease_queue.leased_to("worker-0") == 0
    assert run(DataLoader(Numbers(8), 2, job=job, name="other"), job, 1) == {0: list(range(8))}


def test_a_second_call_goes_on_with_the_next_epochs() -> None:
    job = alone()
    loader = DataLoader(Numbers(8), 2, True, job=job, seed=0)
    assert run(loader, job, 1) == {0: order(8, 0, 0)}
    assert run(loader, job, 2) == {0: order(8, 0, 1), 1: order(8, 0, 2)}


def test_an_evaluation_inside_of_an_epoch_is_no_pass_over_it() -> None:
    job = alone()
    loader, found = DataLoader(Numbers(8), 2, True, job=job, seed=0), []
    for epoch in loader.epochs(2):
        with torch.no_grad():
            assert len(list(loader)) == 4
        found.append((epoch, flat(train(loader, job))))
    assert found == [(0, order(8, 0, 0)), (1, order(8, 0, 1))]


def test_two_passes_in_one_epoch_are_refused() -> None:
    job = alone()
    loader = DataLoader(Numbers(4), 2, job=job)
    with pytest.raises(ConfigError, match=r"epoch 1 passed over the loader more than once.*or loop over range\(n\)"):
        for _ in loader.epochs(2):
            train(loader, job)
            train(loader, job)


def test_it_ends_where_training_stops_by_a_rule() -> None:
    job = alone()
    loader, found = DataLoader(Numbers(8), 2, job=job), []
    for epoch in loader.epochs(5):
        found.append(epoch)
        train(loader, job)
        job.should_stop = epoch == 1
    assert found == [0, 1]


@pytest.mark.parametrize("number", [-1, True, 2.5, "3"])
def test_what_is_no_number_of_epochs_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match=r"epochs\(.*\): must be an int of at least 0"):
        list(DataLoader(Numbers(4), 2, job=alone()).epochs(number))


def test_with_range_an_empty_epoch_names_the_remedy_once() -> None:
    lease_queue = LeaseQueue(2, in_rounds=False)
    train(DataLoader(Numbers(8), 2, job=lease_queue[0]), lease_queue[0])
    again = DataLoader(Numbers(8), 2, job=lease_queue[1])
    assert train(again, lease_queue[1]) == []
    assert [text for text in lease_queue[1].noticed if "loader.epochs(n)" in text] == [
        "epoch 1 of 'loader-0' had no batch left for this worker, so the loop over it was empty: a mean over its "
        "batches would divide by zero. `for epoch in loader.epochs(n):` skips such epochs"
    ]
    assert isinstance(lease_queue[1].samples, WorkerSamples) and lease_queue[1].samples.num_skipped == 0
