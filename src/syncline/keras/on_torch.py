"""Keras on torch: steps run eagerly; under torch.compile the step is left out of the compiled code."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import torch

from syncline.keras.backends import Exchange


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def call_out(exchange: Exchange, tensors: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    arrays = exchange([tensor.detach().cpu().numpy() if torch.is_tensor(tensor) else tensor for tensor in tensors])
    return [torch.from_numpy(array) for array in arrays]


def adopt(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    for variable, array in zip(variables, arrays, strict=True):
        if variable.value.device.type == "cpu":
            variable.value.data = torch.from_numpy(array)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        value = torch.as_tensor(value)
        if variable.value.data_ptr() != value.data_ptr():  # else the job has written it there
            variable.assign(value)


def is_in_xla() -> bool:
    return False


def is_traced() -> bool:
    return False


def outside() -> Any:
    return contextlib.nullcontext()


def dense(gradient: Any) -> Any:
    return gradient.to_dense() if gradient.is_sparse else gradient


def batch(arrays: Any) -> Any:
    return keras.tree.map_structure(keras.ops.convert_to_tensor, arrays)


def end_of_data() -> Exception:
    return StopIteration()


def has_extra_steps() -> bool:
    return False


def settle() -> None:
    """Every step is done when it returns."""
