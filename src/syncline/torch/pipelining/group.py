"""The process group of a pipeline: torch's default one, or a part of the one that the script has made."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from syncline import config as configuration
from syncline.errors import ConfigError
from syncline.torch.pipelining.orders import GroupPlace

dist: Any = torch.distributed  # its types are incomplete
_MAKE_ALIKE = (
    "make the same group in all processes of a pipeline (syncline run --env torchrun sets RANK and WORLD_SIZE), or "
    "leave the call out"
)


def own_place() -> GroupPlace | None:
    """This process's place in a process group that the script has made; None: it has made none."""
    return GroupPlace(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def ranks_of(places: Sequence[GroupPlace | None]) -> list[int]:
    """The ranks of a pipeline's processes in the script's group, by stage; empty if the script has made none."""
    if all(place is None for place in places):
        return []
    known = [place for place in places if place is not None]
    if len(known) < len(places):
        lacking = ", ".join(str(number) for number, place in enumerate(places) if place is None)
        raise ConfigError(
            "Pipeline: the script has called torch.distributed.init_process_group in some processes of this "
            f"pipeline, but not in stage {lacking}; {_MAKE_ALIKE}"
        )
    ranks, sizes = [place.rank for place in known], {place.size for place in known}
    if len(sizes) > 1 or ranks != sorted(set(ranks)):
        told = ", ".join(f"stage {number}: rank {place.rank} of {place.size}" for number, place in enumerate(known))
        raise ConfigError(
            "Pipeline: in the process group that the script has made, the processes must be different ranks in the "
            f"order of the stages ({told}); {_MAKE_ALIKE}"
        )
    return ranks


class PipelineGroup:
    """How the processes of one pipeline send tensors to each other. All count by the numbers of the processes."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.torch_group: Any = None  #: what PipelineStage takes; None: torch's default group
        self._ranks: Sequence[int] = range(size)

    def join(self, ranks: Sequence[int], store_fd: int, seconds: float) -> None:
        """`ranks`: of all processes, in the script's group; empty: they become the default group, on the loopback."""
        if "GLOO_SOCKET_IFNAME" not in configuration.environment_names(("GLOO_SOCKET_IFNAME",)):
            configuration.add_to_environment({"GLOO_SOCKET_IFNAME": "lo"})
        timeout = datetime.timedelta(seconds=seconds)
        if not ranks:
            store = dist.FileStore(f"/proc/self/fd/{store_fd}", self.size)
            dist.init_process_group("gloo", store=store, rank=self.number, world_size=self.size, timeout=timeout)
            return
        self._ranks = list(ranks)
        try:  # whatever the backend of the script's group is: stages compute on CPUs
            group = dist.new_group(self._ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        except RuntimeError as error:
            raise ConfigError(
                "Pipeline: its processes do not find each other by the process group that the script has made "
                f"({str(error).splitlines()[0]}); {_MAKE_ALIKE}"
            ) from error
        self.torch_group = group

    def isend(self, tensor: torch.Tensor, number: int) -> Any:
        return dist.isend(tensor, self._ranks[number], self.torch_group)

    def send(self, tensor: torch.Tensor, number: int) -> None:
        dist.send(tensor, self._ranks[number], self.torch_group)

    def receive(self, tensor: torch.Tensor, number: int) -> None:
        dist.recv(tensor, self._ranks[number], self.torch_group)
