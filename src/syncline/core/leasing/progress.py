"""Progress of a job in the epochs of its loaders, and each worker's share."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.core.leasing.leases import LeaseState
from syncline.core.leasing.ranges import count
from syncline.stats import EpochProgress


def progress(state: LeaseState) -> list[EpochProgress]:
    """The epochs in progress."""
    found = []
    for name, epochs in state.epochs.items():
        for number, epoch in sorted(epochs.items()):
            leased: dict[str, int] = {}
            for lease in epoch.leases.values() if epoch.num_samples and epoch.common is None else ():
                leased[lease.worker] = leased.get(lease.worker, 0) + lease.num_left
            found.append(
                EpochProgress(
                    loader=name,
                    epoch=number,
                    num_samples=epoch.num_samples,
                    num_done=epoch.num_done,
                    num_passed_over=epoch.num_passed_over,
                    num_quarantined=count(suspect_batch.span for suspect_batch in epoch.quarantined),
                    leased=leased,
                    is_steps=name in state.loaders and state.loaders[name].is_steps,
                )
            )
    return found


def shares(samples: Mapping[str, int]) -> dict[str, float]:
    """Each worker's share of all samples read."""
    whole = sum(samples.values())
    return {name: number / whole for name, number in samples.items()} if whole else {}


def epoch_told(epoch: EpochProgress) -> str:
    """epoch 2 (45 %); of shards of unknown length, epoch 2 (4,500 samples); 45 % of 1,000 steps."""
    if epoch.is_steps:
        return f"{_percent(epoch)} % of {epoch.num_samples:,} steps"
    if not epoch.num_samples:
        return f"epoch {epoch.epoch + 1} ({epoch.num_done:,} samples)"
    return f"epoch {epoch.epoch + 1} ({_percent(epoch)} %)"


def _percent(epoch: EpochProgress) -> int:
    return 100 * (epoch.num_samples - epoch.num_left) // epoch.num_samples if epoch.num_samples else 100
