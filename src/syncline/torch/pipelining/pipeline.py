"""`Pipeline`: a model whose stages are computed by the processes of a pipeline; alone, by one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from syncline.core.stages import num_micro_batches, wanted_micro_batches
from syncline.errors import ConfigError
from syncline.net.memory import aligned_zeros
from syncline.net.shm import SharedMemory
from syncline.net.transport import Memory
from syncline.stats import StageSpan, StageStats
from syncline.torch.pipelining.cutting import Chain, Layers
from syncline.torch.pipelining.deferred import forget, materialise
from syncline.torch.pipelining.engine import LossFunction, check_mean, scaled_loss
from syncline.torch.pipelining.lacking import naming_lack_of_memory
from syncline.torch.pipelining.leading import StageLeader
from syncline.torch.pipelining.plan_only import answer_if_asked
from syncline.torch.pipelining.scheduling import StageScheduler
from syncline.torch.pipelining.serving import serve
from syncline.worker.arrays import Bytes
from syncline.worker.current import current_job, stage_job
from syncline.worker.job import Job


class Pipeline(torch.nn.Module):
    """Cuts a model into stages, one per process of `syncline run --stages N`, and trains it by micro-batches.

    `step(x, y)` computes the loss and all gradients; `DistributedOptimizer(..., model=pipe)` makes the step. Give the
    model, or its parts with `stages=[front, back]`: each part takes what the one before it returns, a tensor or a
    tuple of tensors. `loss_fn(output, target)` is the mean over the samples. Parameters have the names of the whole
    model.

    With `--stages`, the scheduler decides where the model is cut, from a profile of the first batch; `cut_before`
    names the modules before which you want it cut. A model that is no `nn.Sequential` is traced with `example=(x,)`.

    With `--stages`, only the first process of a pipeline goes on with the script after this call. Without, the same
    script trains in one process.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        loss_fn: LossFunction | None = None,
        *,
        stages: Sequence[torch.nn.Module] | None = None,
        example: torch.Tensor | Sequence[torch.Tensor] = (),
        cut_before: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if (model is None) == (stages is None):
            raise ConfigError("Pipeline: give a model, or its parts with stages=[front, back]")
        if loss_fn is None or not callable(loss_fn):
            raise ConfigError("Pipeline: give loss_fn, the mean over the samples of a batch, by output and target")
        if stages is not None and (not stages or not all(isinstance(one, torch.nn.Module) for one in stages)):
            raise ConfigError("Pipeline: stages must be a list of torch.nn.Modules")
        example = (example,) if isinstance(example, torch.Tensor) else tuple(example)
        _check_cuts(example, cut_before, stages)
        self.model = model if model is not None else Chain(*cast(Sequence[torch.nn.Module], stages))
        self._given_stages = tuple(stages or ())
        self._loss_fn, self._has_checked_loss, self._has_stepped = loss_fn, False, False
        self._cut_before = tuple(cut_before)
        self._after_step: list[Callable[[], None]] = []
        self._leader: StageLeader | None = None
        self._scheduler: StageScheduler | None = None
        place = stage_job()
        if place is not None:
            serve(place, lambda: Layers(self.model, stages, example, cut_before), loss_fn)
        self._job = current_job()
        config = self._job.config
        self._num_wanted = wanted_micro_batches(config)
        if self._job.stages is not None:
            layers = Layers(self.model, stages, example, cut_before)
            with self.naming_lack_of_memory():
                self._leader = StageLeader(self._job, layers, loss_fn)
            self._scheduler = StageScheduler(self._job, layers, loss_fn, self._leader)
        else:
            with self.naming_lack_of_memory():
                materialise([*self.model.parameters(), *self.model.buffers()])
            forget()

    # -- a module with the names of the whole model -------------------------------------------------------

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        yield from self.model.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.model.state_dict(*args, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if assign and self._leader is not None:
            raise ConfigError("Pipeline: load_state_dict(assign=True) would leave the memory that stages share")
        return self.model.load_state_dict(state_dict, strict)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self._leader is not None:
            raise ConfigError(
                "Pipeline: move or convert the model (.to(), .half(), .cuda()) before you give it to Pipeline"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def create_memory(self, num_bytes: int) -> Bytes:
        """Memory for parameters: zeros, which the stage processes see too."""
        with self.naming_lack_of_memory():
            return self._leader.create_memory(num_bytes) if self._leader is not None else aligned_zeros(num_bytes)

    @property
    def has_stages(self) -> bool:
        """Whether other processes compute a part of the model."""
        return self._leader is not None

    def keep_gradients(self, memory: Memory, offsets: Mapping[torch.Tensor, int]) -> None:
        """From now on other processes make the gradients of these parameters there, if they can see this memory."""
        if self._leader is not None and isinstance(memory, SharedMemory):
            self._leader.keep_gradients(memory, offsets)

    def naming_lack_of_memory(self) -> contextlib.AbstractContextManager[None]:
        """An allocation that fails inside becomes an error with the size of the model and the remedy."""
        return naming_lack_of_memory(self.model, self._job.config.stages)

    # -- training -----------------------------------------------------------------------------------------

    def step(self, *given: Any, scaler: torch.amp.GradScaler | None = None) -> torch.Tensor:
        """Forward, loss and backward of a batch; the target comes last. Returns the mean loss.

        Gradients are added to those that are there, as `loss.backward()` does. `scaler`: its scale is on them.
        """
        *inputs, target = self._checked(given)
        whole = None if self._given_stages else self.model
        answer_if_asked(whole, self._loss_fn, inputs, target, cut_before=self._cut_before, stages=self._given_stages)
        count = self._count(inputs[0].shape[0])
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones(())))
        with self.naming_lack_of_memory():
            if self._leader is not None:
                assert self._scheduler is not None
                self._scheduler.look(inputs, target, count)
                loss = torch.tensor(self._leader.step(inputs, target, count, scale))
            else:
                loss = self._step_alone(inputs, target, count, scale)
        for action in self._after_step:
            action()
        return loss

    def after_step(self, action: Callable[[], None]) -> None:
        """Calls this whenever the gradients of a step are complete."""
        self._after_step.append(action)

    def _count(self, num_samples: int) -> int:
        """The number of micro-batches of a batch. Only later ones may be too short for the number that was set."""
        if not self._has_stepped and not self._job.step and num_samples < self._num_wanted:
            said = self._job.config.micro_batches
            if said != "auto":
                raise ConfigError(
                    f"Pipeline: a batch of {num_samples} samples cannot be cut into {said} micro-batches; use larger "
                    f"batches, or --micro-batches {num_samples} at most"
                )
        self._has_stepped = True
        return num_micro_batches(num_samples, self._num_wanted)

    def _step_alone(self, inputs: list[torch.Tensor], target: torch.Tensor, count: int, scale: float) -> torch.Tensor:
        total, outputs = 0.0, list[torch.Tensor]()
        looks = count > 1 and not self._has_checked_loss
        parts = zip(*(tensor.chunk(count) for tensor in (*inputs, target)), strict=True)
        with torch.enable_grad():
            for *chunk, wanted in parts:
                output = self.model(*chunk)
                loss = scaled_loss(self._loss_fn, output, wanted, scale / count)
                loss.backward()
                total += float(loss.detach().double())
                if looks and isinstance(output, torch.Tensor):
                    outputs.append(output.detach())
        if outputs:
            with torch.no_grad():
                check_mean(total / scale, self._loss_fn, torch.cat(outputs), target)
            self._has_checked_loss = True
        return torch.tensor(total / scale)

    def _checked(self, given: Sequence[Any]) -> list[torch.Tensor]:
        if len(given) < 2:
            raise ConfigError("Pipeline.step(x, y): give the inputs of the model, and the target last")
        sizes = set()
        for one in given:
            if not isinstance(one, torch.Tensor) or not one.dim():
                raise ConfigError(
                    f"Pipeline.step: takes tensors whose first dimension is the samples, not {type(one).__name__}"
                )
            sizes.add(one.shape[0])
        if len(sizes) > 1 or 0 in sizes:
            found = ", ".join(str(tuple(one.shape)) for one in given)
            raise ConfigError(f"Pipeline.step: inputs and target must have as many samples each, not {found}")
        return list(given)

    def stats(self) -> tuple[StageStats, ...]:
        """How busy each process of this pipeline was in its steps; nothing in one process."""
        return self._leader.stats() if self._leader is not None else ()

    def timeline(self) -> tuple[StageSpan, ...]:
        """Every forward and backward of the newest step, by stage and time; nothing in one process."""
        return self._leader.timeline() if self._leader is not None else ()

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluate(self, *inputs: torch.Tensor) -> Any:
        """The model's output, computed without gradients by all stages. Call `eval()` before, as on any model."""
        if self._leader is None:
            with torch.no_grad():
                return self.model(*inputs)
        self._checked((*inputs, inputs[0]))
        count = num_micro_batches(inputs[0].shape[0], self._num_wanted)
        return self._leader.evaluate(list(inputs), count)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """As `evaluate`; in one process with gradients, if they are on."""
        return self.model(*inputs) if self._leader is None else self.evaluate(*inputs)


def _check_cuts(example: Sequence[Any], cut_before: Sequence[str], stages: Sequence[torch.nn.Module] | None) -> None:
    if not all(isinstance(one, torch.Tensor) and one.dim() for one in example):
        raise ConfigError("Pipeline: example must be the inputs of the model, as tensors: example=(x,)")
    if isinstance(cut_before, str) or not all(isinstance(one, str) for one in cut_before):
        raise ConfigError('Pipeline: cut_before takes names of modules: cut_before=["blocks.6"]')
    if cut_before and stages is not None:
        raise ConfigError("Pipeline: give stages or cut_before, not both: stages are cut where they begin")
    if cut_before and not example:
        raise ConfigError("Pipeline: cut_before needs example=(x,), with which the model is traced")


def check_is_pipeline(model: torch.nn.Module | None, job: Job) -> None:
    """Raises ConfigError if the job was started with `--stages` and this is no Pipeline."""
    if job.stages is not None and not isinstance(model, Pipeline):
        raise ConfigError(
            "--stages: this script trains a model that is no Pipeline: make pipe = syncline.torch.Pipeline(model, "
            "loss_fn), give it to DistributedOptimizer(..., model=pipe), train with pipe.step(x, y); or leave out "
            "--stages"
        )
