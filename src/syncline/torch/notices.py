"""Notices for the user: differences between what a script does and what it probably means."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.torch.parameters import Tracked
from syncline.torch.pipelining.pipeline import Pipeline
from syncline.worker.job import Job


class Notices:
    """Reports each notice once."""

    def __init__(self, job: Job, in_rounds: bool) -> None:
        self._job = job
        self._wants_clip_notice = in_rounds and job.world_size > 1
        self._watched: torch.Tensor | None = None
        self._version = -1
        self._kept: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.has_told_change = False

    def at_start(self, model: torch.nn.Module | None) -> None:
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if has_group and self._job.stages is None:  # else it is the pipeline's own
            self._job.notice(
                "there is a default process group: DistributedDataParallel on top of this would average twice"
            )
        if model is None:
            self._job.notice("buffers are not synchronised: give model= to DistributedOptimizer for that")

    def watch(self, items: Sequence[Tracked], model: torch.nn.Module | None) -> None:
        """Watches one parameter to see whether gradients are edited between backward and step."""
        if self._watched is not None or not self._wants_clip_notice:
            return
        found = next((item.tensor for item in items if item.tensor.requires_grad and item.tensor.is_leaf), None)
        if found is None:
            return
        self._watched = found
        if isinstance(model, Pipeline):
            # Gradients of other stages, and of weights that are tied to them, come without a backward here.
            model.after_step(lambda: self._remember(found))
        else:
            found.register_post_accumulate_grad_hook(self._remember)

    def _remember(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._version = parameter.grad._version

    def mind_changes(self, items: Sequence[Tracked]) -> None:
        """From now on, `have_changed` tells whether the script writes to these parameters.

        New values are written below a view, which torch's version counters do not see.
        """
        self._kept = [item.tensor for item in items if item.is_view]
        self._versions = [tensor._version for tensor in self._kept]

    def have_changed(self) -> bool:
        """Whether the script has written to a parameter since the last call; not through `.data`."""
        versions = [tensor._version for tensor in self._kept]
        has_changed, self._versions = versions != self._versions, versions
        return has_changed

    def tell_change(self) -> None:
        self.has_told_change = True
        self._job.notice(
            "the script has written to parameters between two steps (load_state_dict, clamp_, …): this step "
            "overwrites them with the servers' values. Load weights before the first step, in async and bounded "
            "before you create the DistributedOptimizer"
        )

    def before_push(self) -> None:
        if not self._wants_clip_notice or self._watched is None or self._watched.grad is None:
            return
        if self._version >= 0 and self._watched.grad._version != self._version:
            self._wants_clip_notice = False
            self._job.notice(
                "gradients were edited after backward: clip_grad_norm_ clips this worker's own gradient, not the "
                "round's mean; DistributedOptimizer(clip_norm=…) clips the mean"
            )
