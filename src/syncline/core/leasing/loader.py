"""A loader, as all workers of a job must have it."""

from __future__ import annotations

import msgspec

from syncline.errors import ConfigError

#: Names of loaders that begin so are read for a validation, also when training has stopped.
VALIDATES = "validate:"
#: What is more than this is no number of samples.
MOST_SAMPLES, MOST_SHARDS = 1 << 62, 1 << 20


class Loader(msgspec.Struct, frozen=True, array_like=True):
    """What all workers must agree on."""

    num_samples: int
    batch: int
    drop_last: bool = False
    is_auto: bool = False  # parts of a global batch follow the workers' speeds
    num_shards: int = 0  # instead of samples: how many there are in each shows when it is read
    is_global: bool = False  # `batch` is the global batch, of which each worker reads a part
    is_steps: bool = False  # `job.steps`: what is leased are steps of the job

    def check(self) -> None:
        """Of numbers that make no sense the coordinator must not begin to count."""
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
