"""What layers, devices and links cost."""

from __future__ import annotations

import pytest

from syncline.core.pipelining.costs import (
    Device,
    DeviceLink,
    LayerCosts,
    LinkBetween,
    Links,
    MeasuredBatch,
    ModelCosts,
    TiedParameter,
    parameter_bytes,
)
from syncline.errors import ConfigError


def layer(seconds: float, num_bytes: int, name: str = "fc") -> LayerCosts:
    return LayerCosts(
        name=name,
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
        kept_bytes=num_bytes,
        output_bytes=num_bytes // 2,
        parameter_bytes=100,
    )


def test_costs_of_a_size_that_was_not_measured() -> None:
    """Between two sizes a line; beyond the largest in proportion; a tiny batch is as slow as the smallest."""
    costs = ModelCosts(
        measured=(
            MeasuredBatch(num_samples=4, layers=(layer(1.0, 400),)),
            MeasuredBatch(num_samples=8, layers=(layer(1.5, 800),)),
        )
    )
    (at,) = costs.at(6)
    assert (at.forward_seconds, at.backward_seconds, at.kept_bytes, at.output_bytes) == (1.25, 2.5, 600, 300)
    assert costs.at(8) == costs.measured[1].layers
    (at,) = costs.at(16)
    assert (at.forward_seconds, at.kept_bytes, at.parameter_bytes) == (3.0, 1600, 100)
    (at,) = costs.at(1)
    assert (at.forward_seconds, at.kept_bytes) == (1.0, 100)


def test_a_tied_parameter_counts_once_in_a_stage() -> None:
    tied = (TiedParameter(name="embedding.weight", num_bytes=1000),)
    first = LayerCosts(name="embedding", forward_seconds=0.0, backward_seconds=0.0, parameter_bytes=10, tied=tied)
    last = LayerCosts(name="head", forward_seconds=0.0, backward_seconds=0.0, parameter_bytes=20, tied=tied)
    assert parameter_bytes([first]) == 1010 and parameter_bytes([last]) == 1020
    assert parameter_bytes([first, last]) == 1030


def test_a_link_that_is_named_goes_both_ways() -> None:
    slow = DeviceLink(bytes_per_second=1e6, latency_seconds=0.5)
    links = Links(default=DeviceLink(bytes_per_second=1e9), between=(LinkBetween(one="a", two="b", link=slow),))
    assert links.of("a", "b") is slow and links.of("b", "a") is slow
    assert links.of("a", "c").seconds(1e9) == 1.0 and slow.seconds(1e6) == 1.5


def test_what_cannot_be_is_an_error_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"worker-1: speed = 0\.0: must be a number above 0"):
        Device(name="worker-1", speed=0.0)
    with pytest.raises(ConfigError, match="worker-1: memory = -1"):
        Device(name="worker-1", memory_bytes=-1)
    with pytest.raises(ConfigError, match="a link needs a bandwidth above 0"):
        DeviceLink(bytes_per_second=0.0)
