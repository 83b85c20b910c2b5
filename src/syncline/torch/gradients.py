"""Gradients on their way into the arena: at `step()`, or while backward goes on where a socket carries them.

Bytes travel early, they count late: what was edited after backward (clipping, unscaling) is found by comparing
with the bytes that were sent, and staged again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.client.exchange import Exchange
from syncline.core.layout import Ranges, Segment, to_ranges
from syncline.errors import LayoutError
from syncline.torch.parameters import Tracked, as_tensor

#: After this many steps in which most of what was staged early had to be staged again, staging early stops.
PATIENCE = 3


class Gradients:
    """The gradients of the parameters of one segment."""

    def __init__(self, exchange: Exchange, segment: Segment, tracked: Sequence[Tracked], overlap: bool) -> None:
        self._exchange, self._segment = exchange, segment
        index_of = {parameter.name: k for k, parameter in enumerate(segment.parameters)}
        self._items = sorted(((index_of[item.name], item) for item in tracked), key=lambda pair: pair[0])
        self._all = to_ranges(segment.first_parameter + index for index, _ in self._items)
        self._views: dict[int, dict[int, torch.Tensor]] = {}  # by arena: there is one per slot of the window
        self._paused = False
        self._early = overlap and exchange.needs_bytes
        self._wasted = 0
        self._staged: set[int] = set()  # slices
        self._ready: set[int] = set()  # parameters
        self._slices_of: dict[int, list[int]] = {}
        self._parameters_of: dict[int, set[int]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        if self._early:
            self._hook_in()

    # -- early --------------------------------------------------------------------------------------------

    def _hook_in(self) -> None:
        for number, part in enumerate(self._segment.slices):
            members = {piece.parameter for piece in self._segment.pieces(part)}
            self._parameters_of[number] = members
            for index in members:
                self._slices_of.setdefault(index, []).append(number)
        for index, item in self._items:
            if item.tensor.requires_grad and item.tensor.is_leaf:

                def ready(parameter: torch.Tensor, index: int = index) -> None:
                    self._gradient_ready(index, parameter)

                self._hooks.append(item.tensor.register_post_accumulate_grad_hook(ready))

    def pause(self, paused: bool) -> None:
        """While paused, gradients only accumulate."""
        self._paused = paused

    def _gradient_ready(self, index: int, parameter: torch.Tensor) -> None:
        if self._paused or not self._early or parameter.grad is None or parameter.grad.is_sparse:
            return
        if index in self._ready:
            return  # a second backward before the step: found by the comparison there
        self._target(index).copy_(parameter.grad)
        self._ready.add(index)
        for number in self._slices_of[index]:
            if self._parameters_of[number] <= self._ready:
                self._exchange.stage([self._segment.slices[number]])
                self._staged.add(number)

    def _target(self, index: int) -> torch.Tensor:
        """The parameter's place in the arena of the next commit."""
        arena = self._exchange.arena(self._segment.index)
        views = self._views.setdefault(id(arena), {})
        if index not in views:
            parameter = self._segment.parameters[index]
            dtype = getattr(torch, parameter.dtype)
            views[index] = as_tensor(arena, self._segment.offsets[index], parameter.shape, dtype)
        return views[index]

    # -- at the step --------------------------------------------------------------------------------------

    def collect(self, scale: float | torch.Tensor | None = None) -> Ranges:
        """All gradients into the arena, multiplied by `scale`; the ids of the parameters that have one."""
        targets, sources, pushed = [], [], []
        for index, item in self._items:
            gradient = item.tensor.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise LayoutError(f"{item.name!r} has a sparse gradient; not supported yet: use sparse=False")
            pushed.append(index)
            targets.append(self._target(index))
            sources.append(gradient.detach() if scale is None else gradient.detach() * scale)
        if self._ready:
            self._keep_changed(pushed, targets, sources)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._ready.clear()
        self._staged.clear()
        if len(pushed) == len(self._items):
            return self._all
        return to_ranges(self._segment.first_parameter + index for index in pushed)

    def _keep_changed(self, pushed: list[int], targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Of what was copied early, only what has changed since is copied and staged again."""
        changed = []
        for position, index in enumerate(pushed):
            if index not in self._ready or not _same_bits(targets[position], sources[position]):
                changed.append(position)
        again: set[int] = set()
        for position in changed:
            again.update(n for n in self._slices_of.get(pushed[position], ()) if n in self._staged)
        for number in again:
            self._exchange.restage(self._segment.slices[number])
        self._judge(len(again))
        targets[:] = [targets[position] for position in changed]
        sources[:] = [sources[position] for position in changed]

    def _judge(self, num_again: int) -> None:
        self._wasted = self._wasted + 1 if 2 * num_again > len(self._staged) else 0
        if self._wasted >= PATIENCE:
            self._early = False
            for hook in self._hooks:
                hook.remove()

    def norm(self) -> torch.Tensor:
        """The norm of this worker's own gradients, as clip_grad_norm_ takes it."""
        gradients = [item.tensor.grad for _, item in self._items if item.tensor.grad is not None]
        norms = [torch.linalg.vector_norm(gradient).to("cpu") for gradient in gradients]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.dtype != two.dtype or not one.numel():
        return one.dtype == two.dtype
    flat = two.to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(one.reshape(-1).view(torch.uint8), flat)
