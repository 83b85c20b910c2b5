"""Looks at a mirror on the device, with one query for all: does it equal the gradients, is it finite?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from syncline.core.layout import FLOATS, Segment, aligned
from syncline.torch.parameters import shaped

#: Scratch memory for comparing many small parameters at once.
RUN_BYTES = 64 << 20
_MOST_RUNS = 256  # cached views
#: Integer types for comparing bits.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def place_of(flat: torch.Tensor, segment: Segment, index: int, begin: int = 0) -> torch.Tensor:
    """A parameter's place in bytes with the segment's layout, from `begin` on."""
    parameter = segment.parameters[index]
    return shaped(flat, segment.offsets[index] - begin, parameter.shape, getattr(torch, parameter.dtype))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


class Comparison:
    """Compares gradients with their mirror, many at once: a kernel per parameter would be too slow to launch."""

    def __init__(self, segment: Segment, mirror: torch.Tensor, run_bytes: int = RUN_BYTES) -> None:
        self._segment, self._mirror, self._run_bytes = segment, mirror, run_bytes
        self._scratch: torch.Tensor | None = None
        self._views: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def same(self, gradients: Mapping[int, torch.Tensor]) -> set[int]:
        """The indices of the parameters whose gradients equal the mirror."""
        runs = self._runs([index for index, gradient in gradients.items() if self._is_like(index, gradient)])
        if not runs:
            return set()
        differ = torch.stack([self._differs(run, gradients) for run in runs]).tolist()
        same = {index for run, found in zip(runs, differ, strict=True) if not found for index in run}
        unsure = [index for run, found in zip(runs, differ, strict=True) if found and len(run) > 1 for index in run]
        if unsure:
            each = torch.stack([self._differs((index,), gradients) for index in unsure]).tolist()
            same.update(index for index, found in zip(unsure, each, strict=True) if not found)
        return same

    def _is_like(self, index: int, gradient: torch.Tensor) -> bool:
        known = self._segment.parameters[index]
        return gradient.dtype == getattr(torch, known.dtype) and gradient.device == self._mirror.device

    def _runs(self, indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Groups neighbours, as many as the scratch memory holds."""
        runs: list[list[int]] = []
        for index in sorted(indices):
            end = self._end(index)
            last = runs[-1] if runs else None
            if last and last[-1] == index - 1 and end - self._segment.offsets[last[0]] <= self._run_bytes:
                last.append(index)
            else:
                runs.append([index])
        return [tuple(run) for run in runs]

    def _end(self, index: int) -> int:
        return self._segment.offsets[index] + aligned(self._segment.parameters[index].num_bytes)

    def _differs(self, run: tuple[int, ...], gradients: Mapping[int, torch.Tensor]) -> torch.Tensor:
        if len(run) == 1:
            return bits(place_of(self._mirror, self._segment, run[0])).ne(bits(gradients[run[0]])).any()
        begin, end = self._segment.offsets[run[0]], self._end(run[-1])
        scratch = self._scratch_of(end - begin)
        torch._foreach_copy_(self._places(run, scratch, begin), [gradients[index] for index in run])
        return scratch.view(torch.int64).ne(self._mirror[begin:end].view(torch.int64)).any()

    def _scratch_of(self, num_bytes: int) -> torch.Tensor:
        if self._scratch is None:
            size = min(self._run_bytes, self._segment.num_bytes)
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self._mirror.device)
        # Padding between parameters is zero, as in the mirror.
        return self._scratch[:num_bytes].zero_()

    def _places(self, run: tuple[int, ...], scratch: torch.Tensor, begin: int) -> list[torch.Tensor]:
        if run not in self._views:
            if len(self._views) >= _MOST_RUNS:
                self._views.clear()
            self._views[run] = [place_of(scratch, self._segment, index, begin) for index in run]
        return self._views[run]


class MirrorCheck:
    """Whether all numbers of a mirror are finite: its largest one tells."""

    def __init__(self, segment: Segment, mirror: torch.Tensor) -> None:
        runs: list[tuple[int, int, str]] = []  # neighbours of one type
        for part in segment.slices:
            begin, end = part.offset, part.offset + part.num_bytes
            if part.dtype not in FLOATS or not part.num_bytes:
                continue
            if runs and runs[-1][1:] == (begin, part.dtype):
                runs[-1] = (runs[-1][0], end, part.dtype)
            else:
                runs.append((begin, end, part.dtype))
        self._numbers = [mirror[begin:end].view(getattr(torch, dtype)) for begin, end, dtype in runs]
        self._largest: torch.Tensor | None = None

    def begin(self) -> None:
        """Queues the check on the caller's stream."""
        largest = [torch.linalg.vector_norm(numbers, math.inf).float() for numbers in self._numbers]
        self._largest = torch.stack(largest).amax() if largest else None

    def is_finite(self) -> bool:
        """Waits for what the caller's stream has queued until now."""
        return self._largest is None or math.isfinite(float(self._largest))
