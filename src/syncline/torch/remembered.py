"""The saved state of an optimizer: its groups' options, and with local steps its state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from syncline.errors import ConfigError, StoreError
from syncline.torch.schedulers import Schedulers
from syncline.worker.checkpoint.encoding import Encoder


class Remembered:
    """Of one torch optimizer. Options that the script has changed since are kept."""

    def __init__(
        self, opt: torch.optim.Optimizer, schedulers: Schedulers, notice: Callable[[str], None], *, with_state: bool
    ) -> None:
        """`with_state`: it steps here, not on the servers."""
        self._opt, self._schedulers, self._notice, self._with_state = opt, schedulers, notice, with_state
        self._given: list[dict[str, Any]] = []
        self.look()

    def look(self) -> None:
        """Records the options of new groups."""
        self._given += copy.deepcopy(_options(self._opt)[len(self._given) :])

    def take(self) -> dict[str, Any]:
        found: dict[str, Any] = {"given": self._given, "options": _options(self._opt)}
        if self._with_state:
            found["state"] = self._opt.state_dict()["state"]
        schedulers = {name: state for name, state in self._schedulers.state_dicts().items() if _can_be_saved(state)}
        return {**found, "schedulers": schedulers} if schedulers else found

    def put_back(self, saved: Any) -> bool:
        """Restores saved options. Returns whether schedulers were restored."""
        try:
            given, options = saved["given"], saved["options"]
            if self._with_state and "state" in saved:
                groups = self._opt.state_dict()["param_groups"]
                self._opt.load_state_dict({"state": saved["state"], "param_groups": groups})
            for group, own, before, after in zip(self._opt.param_groups, self._given, given, options, strict=True):
                self._put_back(group, own, before, after)
            return self._schedulers.load(saved.get("schedulers", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"what was saved of the optimizer does not fit this one: {error}; use --fresh"
            ) from error

    def _put_back(self, group: dict[str, Any], own: dict[str, Any], before: dict[str, Any], after: Any) -> None:
        for key, value in after.items():
            if key == "params":
                continue
            if key in own and not _same(own[key], before.get(key)):
                self._notice(f"{key} = {own[key]} is set by the script; it was {before.get(key)} when saved")
            elif isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _options(opt: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The serializable options of each group."""
    return [{k: v for k, v in group.items() if k != "params" and _can_be_saved(v)} for group in opt.param_groups]


def _can_be_saved(value: Any) -> bool:
    try:
        Encoder(copies=False).encode(value, "")
    except ConfigError:
        return False
    return True


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one).cpu(), torch.as_tensor(other).cpu()))
    return bool(one == other)
