"""Costs: what layers, devices and links of a pipeline cost, as measured or as said."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from syncline.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TiedParameter:
    """A parameter that several layers use, under the first of its names."""

    name: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """One layer and one micro-batch, on the device on which the layers were measured."""

    name: str  #: path of the module with which the layer begins; a cut may be made before it
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int = 0  #: what autograd keeps from the forward to the backward, parameters not counted
    output_bytes: int = 0  #: all that crosses a cut behind this layer
    parameter_bytes: int = 0  #: parameters that only this layer uses
    tied: tuple[TiedParameter, ...] = ()  #: parameters that other layers use too


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBatch:
    """The costs of all layers for a micro-batch of this size."""

    num_samples: int
    layers: tuple[LayerCosts, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    """The layers of a model, in order, measured with micro-batches of several sizes."""

    measured: tuple[MeasuredBatch, ...]  #: the smallest first
    device_kind: str = "cpu"  #: of the device on which they were measured
    digest: str = ""  #: of the model

    def __post_init__(self) -> None:
        sizes = [batch.num_samples for batch in self.measured]
        assert sizes and sizes == sorted(set(sizes)) and sizes[0] > 0, sizes
        assert len({tuple(layer.name for layer in batch.layers) for batch in self.measured}) == 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.measured[0].layers)

    def at(self, num_samples: int) -> tuple[LayerCosts, ...]:
        """The layers for micro-batches of this size: between two measured sizes linear, beyond the largest in
        proportion to it, below the smallest as slow as the smallest.
        """
        above = next((batch for batch in self.measured if batch.num_samples >= num_samples), None)
        below = next((batch for batch in reversed(self.measured) if batch.num_samples <= num_samples), None)
        if above is None:
            assert below is not None
            factor = num_samples / below.num_samples
            return tuple(_scaled(layer, factor, factor) for layer in below.layers)
        if below is None:
            return tuple(_scaled(layer, 1.0, num_samples / above.num_samples) for layer in above.layers)
        if above is below:
            return above.layers
        part = (num_samples - below.num_samples) / (above.num_samples - below.num_samples)
        return tuple(_between(one, two, part) for one, two in zip(below.layers, above.layers, strict=True))


def _scaled(layer: LayerCosts, seconds: float, num_bytes: float) -> LayerCosts:
    return dataclasses.replace(
        layer,
        forward_seconds=layer.forward_seconds * seconds,
        backward_seconds=layer.backward_seconds * seconds,
        kept_bytes=math.ceil(layer.kept_bytes * num_bytes),
        output_bytes=math.ceil(layer.output_bytes * num_bytes),
    )


def _between(one: LayerCosts, two: LayerCosts, part: float) -> LayerCosts:
    def mixed(name: str) -> float:
        return float(getattr(one, name) * (1.0 - part) + getattr(two, name) * part)

    return dataclasses.replace(
        one,
        forward_seconds=mixed("forward_seconds"),
        backward_seconds=mixed("backward_seconds"),
        kept_bytes=math.ceil(mixed("kept_bytes")),
        output_bytes=math.ceil(mixed("output_bytes")),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Where a stage may run: one worker's device."""

    name: str  #: of the worker
    speed: float = 1.0  #: against the device on which the layers were measured
    memory_bytes: int = 0  #: 0: not known, and not limited
    kind: str = "cpu"
    is_measured: bool = True  #: False: its speed is only said

    def __post_init__(self) -> None:
        if not (self.speed > 0.0 and math.isfinite(self.speed)):
            raise ConfigError(f"{self.name}: speed = {self.speed}: must be a number above 0")
        if self.memory_bytes < 0:
            raise ConfigError(f"{self.name}: memory = {self.memory_bytes}: must be 0 (not limited) or more")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLink:
    """What a transfer costs."""

    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_second > 0.0 and 0.0 <= self.latency_seconds < math.inf):
            raise ConfigError(f"a link needs a bandwidth above 0 and a latency of 0 or more, not {self}")

    def seconds(self, num_bytes: float) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinkBetween:
    """The link between two workers, in both directions."""

    one: str
    two: str
    link: DeviceLink


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The links between workers: those that are named, and one for all others."""

    default: DeviceLink = dataclasses.field(default_factory=DeviceLink)
    between: tuple[LinkBetween, ...] = ()

    def of(self, one: str, two: str) -> DeviceLink:
        pair = {one, two}
        return next((each.link for each in self.between if {each.one, each.two} == pair), self.default)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """What a worker's process needs besides the activations."""

    per_parameter_byte: float = 3.0  #: the parameter, its gradient, and a copy on its way to the servers
    fixed_bytes: int = 0  #: of the process itself


def parameter_bytes(layers: Iterable[LayerCosts]) -> int:
    """What the parameters of these layers take; a tied one counts once."""
    own, tied = 0, {}
    for layer in layers:
        own += layer.parameter_bytes
        tied.update({parameter.name: parameter.num_bytes for parameter in layer.tied})
    return own + sum(tied.values())
