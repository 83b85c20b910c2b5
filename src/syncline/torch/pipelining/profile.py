"""The profile of a torch model: what its layers cost, measured in a few steps, and remembered on this machine."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from syncline import config as configuration
from syncline.core.pipelining.costs import LayerCosts, MeasuredBatch, ModelCosts, TiedParameter
from syncline.core.pipelining.schedules import divisors
from syncline.errors import ConfigError
from syncline.torch.pipelining.layers import Layer, LayeredModel, find_layers

LossFunction = Callable[[Any, Any], torch.Tensor]
#: Each layer is measured so often, after one turn that does not count; slow layers less often.
TURNS, LEAST_TURNS, MOST_SECONDS = 5, 2, 0.4
#: Sizes of micro-batches that are measured: the batch divided by these, as far as it can be.
PARTS = (1, 2, 4, 8, 16)
#: What makes an old profile worthless is counted here.
FORMAT = 1


def profile_model(
    model: torch.nn.Module | None,
    loss_fn: LossFunction | None,
    example: Sequence[torch.Tensor],
    target: Any = None,
    *,
    cut_before: Sequence[str] = (),
    stages: Sequence[torch.nn.Module] = (),
    threads: int = 0,
    micro_batches: int | None = None,
    computes: bool = True,
    cache: pathlib.Path | None = None,
) -> ModelCosts:
    """What the layers cost for micro-batches of this batch, measured here with so many threads (0: as it is).

    The model stays as it is: layers are measured on copies, one at a time. `cache`: the folder for profiles, by
    default the user's. `micro_batches`: only for so many, where that is known. `computes`: see `find_layers`.
    """
    batch = _batch_of(example, target)
    # Not one sample, which a BatchNorm refuses; a micro-batch of one is taken to be as slow as the smallest here.
    sizes = [size for size in divisors(batch) if batch // size in PARTS and (size > 1 or batch == 1)]
    if micro_batches is not None:
        sizes = [batch // micro_batches]
    with _threads(threads), torch.random.fork_rng(devices=[]):
        layered = find_layers(
            model, _part(example, sizes[0]), cut_before=cut_before, stages=stages, computes=computes
        )
        digest = digest_of(layered, loss_fn, example, target, sizes)
        path = (cache if cache is not None else configuration.cache_folder() / "pipelines") / f"{digest}.json"
        if (known := _read(path)) is not None:
            return known
        measured = []
        for size in sizes:
            if size != sizes[0]:  # what the model reads of shapes is a constant of the trace
                layered = find_layers(
                    model, _part(example, size), cut_before=cut_before, stages=stages, computes=computes
                )
            wanted = None if target is None else _part([target], size)[0]
            layers = tuple(_measured(layered, loss_fn, _part(example, size), wanted))
            measured.append(MeasuredBatch(num_samples=size, layers=layers))
    kind = example[0].device.type
    costs = ModelCosts(measured=tuple(measured), device_kind=kind, digest=digest)
    _write(path, costs)
    return costs


def digest_of(
    layered: LayeredModel, loss_fn: Any, example: Sequence[torch.Tensor], target: Any, sizes: Sequence[int]
) -> str:
    """Equal for models that cost the same here: names, shapes, types of modules, the example, torch, the device."""
    model = layered.model
    tensors = [*example, *([target] if isinstance(target, torch.Tensor) else [])]
    parts = {
        "format": FORMAT,
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "machine": _machine(),
        "device": [str(tensor.device) for tensor in tensors],
        "example": [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors],
        "loss": getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__),
        "sizes": list(sizes),
        "layers": [layer.name for layer in layered.layers],
        "modules": [
            [name, type(module).__qualname__, module.extra_repr(), module.training]
            for name, module in model.named_modules()
        ],
        "tensors": [
            [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
            for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        ],
    }
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def _machine() -> str:
    return f"{os.uname().nodename} {os.uname().machine} {configuration.num_cores()}"


def _batch_of(example: Sequence[torch.Tensor], target: Any) -> int:
    if not example or not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in example):
        raise ConfigError("Pipeline: the example must be a tuple of tensors whose first dimension is the samples")
    sizes = {tensor.shape[0] for tensor in (*example, *([target] if isinstance(target, torch.Tensor) else []))}
    if len(sizes) != 1 or 0 in sizes:
        raise ConfigError(f"Pipeline: the tensors of the example have {sorted(sizes)} samples; give as many in each")
    return sizes.pop()


def _part(tensors: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    return [tensor[:size] for tensor in tensors]


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(slots=True)
class _Turn:
    """One forward and backward of a layer."""

    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    outputs: tuple[Any, ...]


def _measured(
    layered: LayeredModel, loss_fn: LossFunction | None, example: Sequence[torch.Tensor], target: Any
) -> Iterator[LayerCosts]:
    """The costs of each layer, in order; the loss belongs to the last one."""
    uses = [name for layer in layered.layers for name in layer.parameters]
    sizes = {name: tensor.nbytes for name, tensor in layered.model.named_parameters()}
    tied = {name for name in uses if uses.count(name) > 1}
    values: tuple[Any, ...] = tuple(example)
    for index, layer in enumerate(layered.layers):
        is_last = index == len(layered.layers) - 1
        module = _measurable(layered.stage(index, index + 1), example[0].device)
        turns = _turns(module, values, loss_fn if is_last else None, target)
        values = turns[-1].outputs
        yield LayerCosts(
            name=layer.name,
            forward_seconds=statistics.median(turn.forward_seconds for turn in turns),
            backward_seconds=statistics.median(turn.backward_seconds for turn in turns),
            kept_bytes=max(turn.kept_bytes for turn in turns),
            output_bytes=0 if is_last else sum(v.nbytes for v in values if isinstance(v, torch.Tensor)),
            parameter_bytes=sum(sizes[name] for name in layer.parameters if name not in tied),
            tied=_tied(layer, tied, sizes),
        )


def _tied(layer: Layer, tied: set[str], sizes: dict[str, int]) -> tuple[TiedParameter, ...]:
    return tuple(TiedParameter(name=name, num_bytes=sizes[name]) for name in layer.parameters if name in tied)


def _measurable(stage: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """A copy that may be trained; of a model on `meta` one with numbers of no meaning."""
    made = copy.deepcopy(stage)
    if any(tensor.device.type == "meta" for tensor in [*made.parameters(), *made.buffers()]):
        made.to_empty(device=device)
        with torch.no_grad():
            for tensor in [*made.parameters(), *made.buffers()]:
                tensor.fill_(0.01) if tensor.is_floating_point() else tensor.zero_()
    return made


def _turns(
    module: torch.nn.Module, values: tuple[Any, ...], loss_fn: LossFunction | None, target: Any
) -> list[_Turn]:
    began, found = time.perf_counter(), [_turn(module, values, loss_fn, target)]
    while len(found) < 1 + LEAST_TURNS or (len(found) < 1 + TURNS and time.perf_counter() - began < MOST_SECONDS):
        found.append(_turn(module, values, loss_fn, target))
    return found[1:]


def _turn(module: torch.nn.Module, values: tuple[Any, ...], loss_fn: LossFunction | None, target: Any) -> _Turn:
    own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # Inputs of a stage are leaves, which want gradients if they can have them. The first layer's are the data.
    given = [_leaf(value) for value in values]
    _synchronize(given)
    began = time.perf_counter()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(*given)
        outputs = output if isinstance(output, tuple) else (output,)
        result = loss_fn(output, target) if loss_fn is not None and target is not None else None
    _synchronize(given)
    forward = time.perf_counter() - began
    results = [result] if result is not None else [each for each in outputs if _has_gradient(each)]
    gradients = [torch.ones_like(each) for each in results]
    began = time.perf_counter()
    if results:
        torch.autograd.backward(results, gradients)
    _synchronize(given)
    backward = time.perf_counter() - began
    for parameter in module.parameters():
        parameter.grad = None
    return _Turn(forward, backward, sum(kept.values()), tuple(_detached(each) for each in outputs))


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaf(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _synchronize(values: Sequence[Any]) -> None:
    """A GPU computes behind the script's back."""
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in values):
        torch.cuda.synchronize()


def _read(path: pathlib.Path) -> ModelCosts | None:
    """A profile that was written before; one that cannot be read is measured again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelCosts)
    except (OSError, msgspec.DecodeError, AssertionError):
        return None


def _write(path: pathlib.Path, costs: ModelCosts) -> None:
    """Whole or not at all. Without a place for it the next run measures again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".new", delete=False) as file:
            file.write(msgspec.json.encode(costs))
        pathlib.Path(file.name).replace(path)
