"""A loader, as all workers of a job must have it."""

from __future__ import annotations

import msgspec

from syncline.errors import ConfigError

#: Loaders with this prefix are for validation, which also runs after training has stopped.
VALIDATES = "validate:"
#: Upper limits of plausible numbers.
MOST_SAMPLES, MOST_SHARDS = 1 << 62, 1 << 20


class Loader(msgspec.Struct, frozen=True, array_like=True):
    """What all workers must agree on."""

    num_samples: int
    batch: int
    drop_last: bool = False
    is_auto: bool = False  # shares of a global batch follow the workers' speeds
    num_shards: int = 0  # instead of samples; each shard's length is known after reading it
    is_global: bool = False  # `batch` is the global batch
    is_steps: bool = False  # `job.steps`: steps of the job are leased

    def check(self) -> None:
        """Refuses implausible numbers."""
        if not (1 <= self.batch <= MOST_SAMPLES and 0 <= self.num_samples <= MOST_SAMPLES):
            raise ConfigError(f"a loader over {self.num_samples} samples in batches of {self.batch}")
        if not 0 <= self.num_shards <= MOST_SHARDS:
            raise ConfigError(f"a loader over {self.num_shards} shards; at most {MOST_SHARDS}")

    def describe(self) -> str:
        if self.is_steps:
            return f"{self.num_samples} steps"
        what = f"{self.num_shards} shards" if self.num_shards else f"{self.num_samples} samples"
        last = ", the last left out (drop_last=True)" if self.drop_last else ""
        size = f"global batches of {self.batch}" if self.is_global else f"batches of {self.batch}"
        return f"{what} in {size}{last}" + (', batch="auto"' if self.is_auto else "")
