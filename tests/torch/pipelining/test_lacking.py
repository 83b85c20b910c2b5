"""A process that has no memory says how large the model is, and what helps."""

from __future__ import annotations

import pytest
import torch

from syncline.errors import ConfigError
from syncline.torch.pipelining.lacking import naming_lack_of_memory

TOO_MUCH = 1 << 61


@pytest.mark.parametrize("by", ["torch", "numpy", "a stage of torch"])
def test_an_allocation_that_fails_is_named(by: str) -> None:
    model = torch.nn.Linear(1024, 1023)  # with its bias: 4 MiB
    with (
        pytest.raises(
            ConfigError, match=r"no memory left. The model has 4 MiB of parameters .* in 2 stages; use more"
        ),
        naming_lack_of_memory(model, 2),
    ):
        if by == "numpy":
            raise MemoryError("Unable to allocate 2.00 EiB")
        try:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        except RuntimeError as error:
            if by == "torch":
                raise
            raise RuntimeError("Stage 1 failed to run forward") from error  # as torch.distributed.pipelining does


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), naming_lack_of_memory(torch.nn.Linear(1, 1), 1):
        torch.ones(2, 3) @ torch.ones(2, 3)
