"""How many members of each role there are to be: said by people, or by `-w auto`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from syncline.core.units import counted
from syncline.core.wire.control import Retire, Scale
from syncline.core.wire.message import Done
from syncline.errors import ConfigError
from syncline.net.rpc import Request

if TYPE_CHECKING:
    from syncline.coordinator.service import Coordinator


class Scaling:
    """The launcher starts who is missing; who is too many is asked to leave, and reminded of it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._c = coordinator

    def handle(self, request: Request, message: Scale) -> None:
        asked = {"worker": message.workers, "server": message.servers}
        self.scale({role: count for role, count in asked.items() if count is not None})
        request.reply(Done())

    def scale(self, wanted: Mapping[str, int]) -> None:
        """So many there are to be of each of these roles from now on."""
        with self._c.lock:
            if self._c.config.is_ring and "server" in wanted:
                raise ConfigError(
                    "this job is a ring: every worker's process has a server in it; say how many workers, with -w"
                )
            for role, count in wanted.items():
                self._set_wanted(role, count)
            self._c.membership.state.num_scalings += 1
            self._c.keep()

    def _set_wanted(self, role: str, count: int) -> None:
        config = self._c.config
        if count < 1:
            raise ConfigError(f"{count} {role}s: there must be at least one")
        if role == "server" and count < max(1, config.replicas):
            raise ConfigError(f"{counted(count, 'server')} cannot have {config.replicas} replicas of each slice")
        if role == "worker" and config.most_workers and count > config.most_workers:
            raise ConfigError(f"{counted(count, 'worker')}: the job was started with -w …:{config.most_workers}")
        self._c.membership.state.wanted[role] = count
        if config.is_ring:
            self._c.membership.state.wanted["server"] = count  # each leaves with its worker, by itself
        live = [name for name in self._c.membership.named(role) if name not in self._c.retiring]
        surplus = live[count:]
        going = f"; {', '.join(surplus)} {'retires' if len(surplus) == 1 else 'retire'}" if surplus else ""
        self._c.event(f"from now on there {'is' if count == 1 else 'are'} to be {counted(count, role)}{going}")
        for name in surplus:
            self._c.retiring.add(name)
            endpoint = self._c.endpoints.get(name)
            if endpoint is not None:
                endpoint.mention(Retire())

    def remind_to_retire(self, name: str) -> None:
        """There are more of its role than are wanted; whoever was asked to leave may not have heard it."""
        with self._c.lock:
            member = self._c.membership.state.members.get(name)
            if member is None or (self._c.config.is_ring and member.role == "server"):
                return
            surplus = self._c.membership.named(member.role)[self._c.membership.state.wanted[member.role] :]
            if name in self._c.retiring or (name in surplus and self._c.membership.formed):
                self._c.retiring.add(name)
                endpoint = self._c.endpoints.get(name)
                if endpoint is not None:
                    endpoint.mention(Retire())
