"""A torch module with the weights of a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from syncline.errors import StoreError
from syncline.serve.datatypes import Array
from syncline.serve.model import SavedWeights, named_outputs
from syncline.store.weights import Weight


def is_module(model: object) -> bool:
    return isinstance(model, nn.Module)


def num_gpus_of_torch() -> int:
    """GPUs that torch can use in this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class TorchModel:
    """Calls the module on batches, under `inference_mode`, in eval mode."""

    def __init__(
        self,
        module: nn.Module,
        weights: SavedWeights | None,
        where: str,
        hooks: Mapping[str, Callable[..., Any]],
        *,
        in_place: bool = False,
        device: str = "",
    ) -> None:
        """`in_place`: the module uses the weights where they are, as far as its datatypes and device are theirs.
        `device`: where the module computes; '': where it is.
        """
        if weights is not None:
            load_weights(module, weights, where, in_place=in_place)
        if device:
            module = module.to(device)
        self._module = module.eval().requires_grad_(False)
        self._hooks = hooks
        first = next(iter(module.parameters()), None)
        self._device = first.device if first is not None else torch.device(device or "cpu")

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        pre, predict, post = (self._hooks.get(name) for name in ("preprocess", "predict", "postprocess"))
        with torch.inference_mode():
            given: Any = {name: self._tensor(array) for name, array in inputs.items()}
            if pre is not None:
                given = pre(given)
            if predict is not None:
                found = predict(self._module, given)
            elif isinstance(given, Mapping):
                found = self._module(*given.values())
            else:
                found = self._module(given)
            return named_outputs(post(found) if post is not None else found, _array)

    def _tensor(self, array: Array) -> torch.Tensor:
        if not array.flags.writeable:  # torch would warn; nothing may write to the bytes of a request
            array = array.copy()
        return torch.from_numpy(array).to(self._device)


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.float() if value.dtype == torch.bfloat16 else value
        found: Array = value.detach().cpu().numpy()
        return found
    return np.asarray(value)


def weights_of(module: nn.Module) -> SavedWeights:
    """The module's own weights, as they would be saved: a tensor with several names once."""
    found = {}
    seen = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        host = value.detach().cpu().contiguous()
        weight = Weight(name, str(host.dtype).removeprefix("torch."), tuple(host.shape))
        found[name] = (weight, host.reshape(-1).view(torch.uint8).numpy())
    return found


def load_weights(module: nn.Module, weights: SavedWeights, where: str, *, in_place: bool = False) -> None:
    """Puts saved weights into the module. StoreError: they do not fit."""
    state = {}
    for name, (weight, data) in weights.items():
        kind = getattr(torch, weight.dtype)
        tensor = torch.from_numpy(data).view(kind) if data.size else torch.empty(0, dtype=kind)
        state[name] = tensor.reshape(weight.shape)
    own = module.state_dict()
    if unknown := state.keys() - own.keys():
        raise StoreError(
            f"{where} does not fit the model: it has {min(unknown)!r}, which the model lacks; serve the model that "
            "was trained"
        )
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tied = _tied(module)
    missing = [name for name in parameters - state.keys() if not any(other in state for other in tied[name])]
    if missing:
        raise StoreError(
            f"{where} does not fit the model: it lacks {min(missing)!r}; serve the model that was trained"
        )
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise StoreError(
                f"{where} does not fit the model: {name!r} has shape {list(tensor.shape)}, the model's has "
                f"{list(own[name].shape)}"
            )
    if in_place:
        for names in tied.values():  # each name is assigned on its own
            given = next((state[name] for name in names if name in state), None)
            state.update({name: given for name in names if given is not None})
        state = {name: tensor.to(own[name].device, own[name].dtype) for name, tensor in state.items()}
    module.load_state_dict(state, strict=False, assign=in_place)


def _tied(module: nn.Module) -> dict[str, list[str]]:
    """The names of each parameter: the same tensor under several names is saved once."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return {name: names for names in by_tensor.values() for name in names}
