"""Finds the learning-rate schedulers of an optimizer, to restore them after a restart and to keep them from ending
the script.

torch has no list of them. The first one wraps the optimizer's `step`, so that only scripts with schedulers pay for
the search through the garbage collector's objects.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR

_MARK = "_wrapped_by_lr_sched"


class Schedulers:
    """Of one optimizer, known to the script as wrapper or wrapped."""

    def __init__(
        self, faces: Iterable[torch.optim.Optimizer], notice: Callable[[str], None], *, holds: bool = True
    ) -> None:
        """`holds`: OneCycleLR stays at its end. A single worker knows how many steps it makes."""
        self._faces, self._notice, self._holds = tuple(map(weakref.ref, faces)), notice, holds
        self._found: dict[str, Any] = {}  # by class
        self._num_looks, self._next_look = 0, 0

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        """By class name; without those that cannot be told apart."""
        self._num_looks += 1
        if self._num_looks > self._next_look:  # later ones are found later; the search becomes rarer
            self._next_look = 2 * self._num_looks
            self.look()
        return {name: scheduler.state_dict() for name, scheduler in self._found.items()}

    def load(self, states: dict[str, dict[str, Any]]) -> bool:
        """Restores each by class. Returns whether any was restored."""
        self.look()
        known = self._found.keys() & states.keys()
        for name in sorted(known):
            self._found[name].load_state_dict(states[name])
        return bool(known)

    def look(self) -> None:
        """Finds the current ones."""
        faces = [face for known in self._faces if (face := known()) is not None]
        if not any(hasattr(face.step, _MARK) for face in faces):
            return
        made = [one for one in _holders(faces) if _of(one) in faces]
        inner = {id(one) for outer in made for one in getattr(outer, "_schedulers", ())}
        outermost = [one for one in made if id(one) not in inner]
        names = [f"{type(one).__module__}.{type(one).__qualname__}" for one in outermost]
        twice = {name for name in names if names.count(name) > 1}
        for name in sorted(twice):
            self._notice(
                f"there are two schedulers of the class {name} on one optimizer: a restarted worker "
                'cannot tell them apart; name each, e.g. job.state["warmup"] = scheduler'
            )
        self._found = {name: one for name, one in zip(names, outermost, strict=True) if name not in twice}
        for one in made:
            if self._holds and type(one) is OneCycleLR:
                one.__class__ = self._held

    @functools.cached_property
    def _held(self) -> type[OneCycleLR]:
        """Makes OneCycleLR stay at its last step instead of raising. A worker cannot know its number of steps:
        after a death the others make more, and without rounds the faster one does.
        """
        notice = self._notice

        class Held(OneCycleLR):
            def step(self, epoch: int | None = None) -> None:
                if epoch is None and self.last_epoch >= self.total_steps:
                    notice(
                        f"OneCycleLR has come to the end of its {self.total_steps} steps, and this worker makes more "
                        "(others died, or are slower). The learning rate stays as it is; syncline.torch.schedule "
                        "follows the progress of the whole job instead"
                    )
                    return
                super().step(epoch)

            def __reduce_ex__(self, protocol: Any) -> Any:
                return OneCycleLR.__new__, (OneCycleLR,), self.__dict__

        # Saved and found under the name of torch's class.
        Held.__module__, Held.__qualname__ = OneCycleLR.__module__, OneCycleLR.__qualname__
        return Held


def _holders(optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
    """The schedulers that refer to these optimizers, themselves or by their attributes."""
    # By type only: touching foreign objects may warn or import modules.
    kind = torch.optim.lr_scheduler.LRScheduler
    found = gc.get_referrers(*optimizers)
    attributes = [one for one in found if type(one) is dict]
    if attributes:
        found += gc.get_referrers(*attributes)
    return list({id(one): one for one in found if issubclass(type(one), kind)}.values())


def _of(scheduler: Any) -> Any:
    """Its optimizer; None if its constructor failed."""
    return getattr(scheduler, "optimizer", None)
