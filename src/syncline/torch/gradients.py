"""Gradients on their way into the arena: at `step()`, or while backward goes on where that helps.

Bytes travel early, they count late: what was edited after backward (clipping, unscaling) is found at the step, by
digests of what was copied or by comparing with it, and carried again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from syncline.core.layout import Ranges, Segment, to_ranges
from syncline.core.rule import SPARSE_REMEDY
from syncline.errors import LayoutError
from syncline.torch.carriers import Carrier
from syncline.torch.parameters import Tracked

#: After this many steps in which most of what was carried early had to be carried again, carrying early stops.
PATIENCE = 3


class Gradients:
    """The gradients of the parameters of one segment."""

    def __init__(self, carrier: Carrier, segment: Segment, tracked: Sequence[Tracked], overlap: bool) -> None:
        self._carrier, self._segment = carrier, segment
        index_of = {parameter.name: k for k, parameter in enumerate(segment.parameters)}
        self._items = sorted(((index_of[item.name], item) for item in tracked), key=lambda pair: pair[0])
        self._all = to_ranges(segment.first_parameter + index for index, _ in self._items)
        self._paused = False
        self.finite: Ranges = ()  #: of what `collect` has copied, the ids of what was found to be finite by that
        self.as_staged: frozenset[int] = frozenset()  #: slices, by id, that are what they were when they were carried
        self._early = overlap
        self._wasted = 0
        self._carried: set[int] = set()  # slices
        self._ready: set[int] = set()  # parameters
        self._finite: set[int] = set()  # those of them that were found to be so
        self._slices_of: dict[int, list[int]] = {}
        self._parameters_of: list[set[int]] = []
        for number, part in enumerate(segment.slices):
            self._parameters_of.append({piece.parameter for piece in segment.pieces(part)})
            for index in self._parameters_of[-1]:
                self._slices_of.setdefault(index, []).append(number)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked: set[int] = set()  # parameters that will get gradients
        self._see_to_hooks()

    # -- early --------------------------------------------------------------------------------------------

    def _see_to_hooks(self) -> None:
        """As soon as it helps: who takes part may change."""
        if self._hooks or not self._early or not self._carrier.helps_early:
            return
        for index, item in self._items:
            if item.tensor.requires_grad and item.tensor.is_leaf:

                def ready(parameter: torch.Tensor, index: int = index) -> None:
                    self._gradient_ready(index, parameter)

                self._hooked.add(index)
                self._hooks.append(item.tensor.register_post_accumulate_grad_hook(ready))

    def pause(self, paused: bool) -> None:
        """While paused, gradients only accumulate."""
        self._paused = paused

    def _gradient_ready(self, index: int, parameter: torch.Tensor) -> None:
        if (
            self._paused
            or not (self._early and self._carrier.helps_early)
            or parameter.grad is None
            or parameter.grad.is_sparse
        ):
            return
        if index in self._ready:
            return  # a second backward before the step: found by the comparison there
        if self._carrier.copy_early(index, parameter.grad.detach()):
            self._finite.add(index)
        self._ready.add(index)
        whole = [n for n in self._slices_of.get(index, ()) if self._parameters_of[n] & self._hooked <= self._ready]
        self._carried.update(whole)
        self._carrier.carry(whole)

    # -- at the step --------------------------------------------------------------------------------------

    def collect(self, scale: torch.Tensor | None = None) -> Ranges:
        """All gradients into the arena, multiplied by `scale`; the ids of the parameters that have one."""
        self.finite, self.as_staged = (), frozenset()
        gradients = self._gradients()
        changed = dict(gradients)
        if scale is None:
            early = {index: gradient for index, gradient in gradients.items() if index in self._ready}
            for index in self._carrier.same(early) if early else ():
                del changed[index]
        if changed:
            found = self._carrier.fill(changed)
            self._finite = (self._finite - changed.keys()).union(found if scale is None else ())
            if scale is not None:
                for target in self._carrier.targets(changed):
                    target.mul_(scale.reshape(()))
        finite: Collection[int] = self._finite & gradients.keys()
        if self._carrier.helps_early or self._ready:
            self._finish(gradients, changed)
            self._see_to_hooks()
        if self._carrier.hand_over():
            finite = gradients
        self._finite.clear()
        self.finite = self._ranges(finite)
        return self._ranges(gradients)

    def _ranges(self, indices: Collection[int]) -> Ranges:
        if len(indices) == len(self._items):
            return self._all
        return to_ranges(self._segment.first_parameter + index for index in indices)

    def _gradients(self) -> dict[int, torch.Tensor]:
        found = {}
        for index, item in self._items:
            gradient = item.tensor.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise LayoutError(f"{item.name!r} has a sparse gradient, and servers take none yet; {SPARSE_REMEDY}")
            found[index] = gradient.detach()
        return found

    def _finish(self, gradients: Iterable[int], changed: Iterable[int]) -> None:
        again = {n for index in changed for n in self._slices_of.get(index, ())} & self._carried
        late = {n for index in gradients for n in self._slices_of.get(index, ())} - self._carried
        self._carrier.finish(again | late)
        self.as_staged = frozenset(self._segment.slices[number].id for number in self._carried - again)
        self._judge(len(again))
        self.forget()

    def _judge(self, num_again: int) -> None:
        self._wasted = self._wasted + 1 if 2 * num_again > len(self._carried) else 0
        if self._wasted >= PATIENCE:
            self._early = False
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def forget(self) -> None:
        """What was copied early is nothing any more: a new step begins."""
        self._ready.clear()
        self._finite.clear()
        self._carried.clear()

    def drop(self) -> None:
        """This step's gradients do not count."""
        self._carrier.finish(set())
        self.forget()

    def norm(self) -> torch.Tensor:
        """The norm of this worker's own gradients, as clip_grad_norm_ takes it."""
        norms = [torch.linalg.vector_norm(gradient).to("cpu") for gradient in self._gradients().values()]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
