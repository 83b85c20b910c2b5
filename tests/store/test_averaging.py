"""The mean of several checkpoints: of every kind of number, rounded as it should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syncline.store.averaging import narrow, wide


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_numbers_are_widened_and_rounded_as_torch_does(dtype: str) -> None:
    kind = getattr(torch, dtype)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(kind)
    data = values.view(torch.uint8).numpy()
    widened = wide(data, dtype)
    assert np.array_equal(widened, values.double().numpy())
    assert np.array_equal(narrow(widened, dtype), data)
    third = torch.from_numpy(widened / 3)
    expected = third.float().to(kind) if dtype == "bfloat16" else third.to(kind)
    assert np.array_equal(narrow(widened / 3, dtype), expected.view(torch.uint8).numpy())
