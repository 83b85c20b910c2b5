"""This process's stages, run by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from syncline.errors import ConfigError
from syncline.stats import StageSpan
from syncline.torch.pipelining.group import PipelineGroup
from syncline.torch.pipelining.orders import PrepareBatches, TensorMeta
from syncline.worker.stages import Activity

LossFunction = Callable[[Any, Any], torch.Tensor]
_CPU = torch.device("cpu")
#: How far the mean of the micro-batches' losses may lie from the loss of the whole batch.
_LOSS_TOLERANCE = 1e-3


def describe(tensors: Sequence[torch.Tensor]) -> list[TensorMeta]:
    return [TensorMeta(list(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in tensors]


def empty(meta: TensorMeta, device: str = "cpu") -> torch.Tensor:
    return torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=device)


def num_bytes(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * int(getattr(torch, meta.dtype).itemsize)


def as_tuple(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, tuple | list) else (output,)


@contextlib.contextmanager
def autocast(dtype: str) -> Iterator[None]:
    """The autocast of the script's process; `dtype`: empty where there is none."""
    if not dtype:
        yield
        return
    with torch.autocast("cpu", dtype=getattr(torch, dtype)):
        yield


def autocast_now() -> str:
    if not torch.is_autocast_enabled("cpu"):
        return ""
    return str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")


def infer(module: torch.nn.Module, inputs: Sequence[TensorMeta], dtype: str) -> list[TensorMeta]:
    """The tensors that a part of the model makes: found without computing them, if its code does not read values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    named = [*module.named_parameters(), *module.named_buffers()]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            output = _forward(module, {name: fake.from_tensor(tensor) for name, tensor in named}, inputs, dtype)
    except Exception:  # whatever it is: the real forward says better what is wrong
        output = _computed(module, inputs, dtype)
    if not all(isinstance(one, torch.Tensor) for one in output):
        names = ", ".join(sorted({type(one).__name__ for one in output}))
        raise ConfigError(
            f"Pipeline: a stage ({type(module).__name__}) returns {names}: stages pass tensors, or tuples of "
            "tensors; cut the model elsewhere, or give stages=[...] that do"
        )
    return describe(output)


def _computed(module: torch.nn.Module, inputs: Sequence[TensorMeta], dtype: str) -> tuple[Any, ...]:
    state = {name: tensor.clone() for name, tensor in module.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]):
            return _forward(module, state, inputs, dtype)
    except RuntimeError as error:
        if "in-place operation" not in str(error):
            raise
        raise ConfigError(
            f"Pipeline: a stage ({type(module).__name__}) edits in place what the stage before it gives: "
            f"{str(error).splitlines()[0]}; compute a new tensor there (y = f(x), inplace=False), or cut elsewhere"
        ) from error


def _forward(
    module: torch.nn.Module, state: dict[str, torch.Tensor], inputs: Sequence[TensorMeta], dtype: str
) -> tuple[Any, ...]:
    """The output of zeros; `state` takes the place of parameters and buffers."""
    with torch.enable_grad(), autocast(dtype):
        given = []
        for meta in inputs:
            tensor = empty(meta).zero_()
            given.append(tensor.requires_grad_() if meta.requires_grad else tensor)
        return as_tuple(torch.func.functional_call(module, state, tuple(given)))


class _FixedShapes(torch.nn.Module):
    """A part of the model. The next stage has made room for outputs of these shapes."""

    def __init__(self, part: torch.nn.Module, number: int, outputs: Sequence[TensorMeta]) -> None:
        super().__init__()
        self.part, self._number = part, number
        self._shapes = [tuple(meta.shape) for meta in outputs]

    def forward(self, *given: Any) -> Any:
        output = self.part(*given)
        shapes = [tuple(one.shape) for one in as_tuple(output)]
        if shapes != self._shapes:
            raise ConfigError(
                f"Pipeline: part {self._number} of the model gives tensors of shape {_listed(shapes)}, and for other "
                f"values {_listed(self._shapes)}: what stages pass on must have one shape for one size of "
                "micro-batches; cut the model where it has, or pad"
            )
        return output


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes))


class PreparedSchedule(NamedTuple):
    """A kind of batch: its schedule, and how many micro-batches it has."""

    schedule: Any
    num_micro_batches: int
    autocast: str


class StageEngine:
    """The stages of one process of a pipeline. Every process makes the same calls in the same order."""

    def __init__(
        self,
        own: Sequence[int],
        num_parts: int,
        loss_fn: LossFunction | None,
        schedule: str,
        activity: Activity,
        group: PipelineGroup,
    ) -> None:
        """`own`: the numbers of this process's parts. `activity`: says to other threads when these compute."""
        self._own, self._num_parts, self._loss_fn, self._schedule = tuple(own), num_parts, loss_fn, schedule
        self._rank = self._own[0]  # the parts of a process begin with the one of its number
        self._prepared: dict[int, PreparedSchedule] = {}
        self._scale, self._mean = 1.0, 1
        self._checked: set[int] = set()  # kinds of batches whose loss is known to be a mean
        self.spans: list[StageSpan] = []  #: forwards and backwards since the last step began, by time.perf_counter
        self._activity, self._group = activity, group
        self.has_failed = False  #: the model or the loss has raised; else an exception is of the connections

    @property
    def has_last(self) -> bool:
        return self._num_parts - 1 in self._own

    def prepare(self, order: PrepareBatches, parts: Sequence[torch.nn.Module]) -> None:
        """Makes the schedule for a new kind of batch. `parts`: of the whole model."""
        from torch.distributed.pipelining import PipelineStage

        for key in order.forgets:
            self._prepared.pop(key, None)
        stages: list[Any] = [
            PipelineStage(
                _FixedShapes(parts[number], number, order.boundaries[number + 1]),
                number,
                self._num_parts,
                _CPU,
                input_args=_metas(order.boundaries[number]),
                output_args=_metas(order.boundaries[number + 1]),
                group=self._group.torch_group,
            )
            for number in self._own
        ]
        for number, stage in zip(self._own, stages, strict=True):
            stage.forward_one_chunk = self._timed(number, "F", stage.forward_one_chunk)
            stage.backward_one_chunk = self._timed(number, "B", stage.backward_one_chunk)
        loss = self._loss if order.trains else None
        kind = _kind_of(self._schedule, order, self._group.size)
        given = stages[0] if len(stages) == 1 else stages
        schedule = kind(given, order.num_micro_batches, loss_fn=loss, scale_grads=False)
        self._prepared[order.key] = PreparedSchedule(schedule, order.num_micro_batches, order.autocast)

    def _timed(self, part: int, kind: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(micro_batch: int, *args: Any, **options: Any) -> Any:
            began, self._activity.is_computing = time.perf_counter(), True
            try:
                return compute(micro_batch, *args, **options)
            except BaseException as error:
                self.has_failed = True
                if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None  # not torch's words about it
                raise
            finally:
                self.spans.append(StageSpan(self._rank, part, kind, micro_batch, began, time.perf_counter()))
                self._activity.is_computing = False

        return run

    def _loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        """The part of a micro-batch in the batch's mean, times the factor of a GradScaler."""
        assert self._loss_fn is not None
        with self._of_the_script():
            return scaled_loss(self._loss_fn, output, target, self._scale / self._mean)

    @contextlib.contextmanager
    def _of_the_script(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.has_failed = True
            raise

    def step(
        self, key: int, inputs: Sequence[torch.Tensor], target: torch.Tensor | None, scale: float
    ) -> float | None:
        """Forward and backward of all micro-batches; the batch's mean loss, where the last stage is."""
        prepared, self.spans = self._prepared[key], []
        self._scale, self._mean = scale, prepared.num_micro_batches
        losses: list[torch.Tensor] | None = [] if self.has_last else None
        looks = self.has_last and key not in self._checked and prepared.num_micro_batches > 1
        with torch.enable_grad(), autocast(prepared.autocast):
            given = {"target": target, "losses": losses} if self.has_last else {}
            output = prepared.schedule.step(*inputs, **given, return_outputs=looks)
        if losses is None:
            return None
        total = float(torch.stack([loss.detach().double() for loss in losses]).sum()) / scale
        if looks:
            assert self._loss_fn is not None and target is not None
            with torch.no_grad(), autocast(prepared.autocast), self._of_the_script():
                check_mean(total, self._loss_fn, output, target)
            self._checked.add(key)
        return total

    def evaluate(self, key: int, inputs: Sequence[torch.Tensor]) -> Any:
        """The output of the whole model, where the last stage is."""
        prepared = self._prepared[key]
        with torch.no_grad(), autocast(prepared.autocast):
            return prepared.schedule.step(*inputs)


def scaled_loss(loss_fn: LossFunction, output: Any, target: Any, factor: float) -> torch.Tensor:
    loss = loss_fn(output, target)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigError(
            f"Pipeline: loss_fn returns {what}; it must return one number, the mean over the samples "
            '(reduction="mean")'
        )
    return loss * factor


def check_mean(mean: float, loss_fn: LossFunction, output: Any, target: Any) -> None:
    """Raises unless the loss of the batch is the mean of its micro-batches' losses."""
    whole = float(loss_fn(output, target))
    if abs(whole - mean) > _LOSS_TOLERANCE * max(1.0, abs(whole)):
        raise ConfigError(
            f"Pipeline: the loss of a batch is {whole:.6g}, and the mean over its micro-batches {mean:.6g}: loss_fn "
            'must be the mean over samples (reduction="mean", no weights by class, nothing left out); or use '
            "--micro-batches 1"
        )


def _metas(metas: Sequence[TensorMeta]) -> tuple[torch.Tensor, ...]:
    return tuple(empty(meta, "meta").requires_grad_(meta.requires_grad) for meta in metas)


def _kind_of(schedule: str, order: PrepareBatches, num_processes: int) -> Any:
    """torch's schedule. A short batch may have too few micro-batches for the one that was set."""
    from torch.distributed.pipelining import schedules

    count = order.num_micro_batches
    if schedule == "interleaved":
        rounds = max(1, count // num_processes)
        fits = order.trains and count % rounds == 0
        return schedules.ScheduleInterleaved1F1B if fits else schedules.ScheduleLoopedBFS
    fits = schedule == "1f1b" and order.trains and count >= num_processes
    return schedules.Schedule1F1B if fits else schedules.ScheduleGPipe
