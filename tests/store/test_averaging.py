"""The mean of several checkpoints: of every kind of number, rounded as it should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syncline.store.averaging import _narrow, _wide


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_numbers_are_widened_and_rounded_as_torch_does(dtype: str) -> None:
    kind = getattr(torch, dtype)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(kind)
    data = values.view(torch.uint8).numpy()
    wide = _wide(data, dtype)
    assert np.array_equal(wide, values.double().numpy())
    assert np.array_equal(_narrow(wide, dtype), data)
    third = torch.from_numpy(wide / 3)
    expected = third.float().to(kind) if dtype == "bfloat16" else third.to(kind)
    assert np.array_equal(_narrow(wide / 3, dtype), expected.view(torch.uint8).numpy())
