"""`deferred_init`: the values that a model has without it, made for some of its tensors only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from syncline.errors import ConfigError
from syncline.torch.pipelining.deferred import deferred_init, forget, materialise


class Several(nn.Module):
    """Most ways in which models are initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.attention = nn.Embedding(50, 32), nn.MultiheadAttention(32, 4)
        self.linear, self.norm, self.conv = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tril(torch.ones(7, 7)))
        self.places = nn.Parameter(torch.randn(1, 7, 32) * 0.02)
        self.square = nn.Parameter(nn.init.orthogonal_(torch.empty(5, 5), gain=2.0))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 4), 0.5))
        self.apply(self.initialise)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)


def both() -> tuple[Several, Several]:
    torch.manual_seed(5)
    plain = Several()
    torch.manual_seed(5)
    with deferred_init():
        return plain, Several()


def test_values_are_bit_equal_and_tensors_stay_the_same_objects() -> None:
    plain, deferred = both()
    try:
        before = {name: id(parameter) for name, parameter in deferred.named_parameters()}
        assert all(parameter.is_meta for parameter in deferred.parameters())
        materialise([*deferred.parameters(), *deferred.buffers()])
        assert {name: id(parameter) for name, parameter in deferred.named_parameters()} == before
        assert deferred.head.weight is deferred.tokens.weight
        for (name, one), two in zip(plain.state_dict().items(), deferred.state_dict().values(), strict=True):
            assert torch.equal(one, two), name
    finally:
        forget()


def test_one_part_has_the_same_values_and_the_rest_no_memory() -> None:
    """Random numbers of the rest are drawn and dropped; the script's own are not disturbed."""
    plain, deferred = both()
    try:
        state = torch.get_rng_state()
        materialise([deferred.linear.weight, deferred.mask, deferred.square])
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(plain.linear.weight, deferred.linear.weight)
        assert torch.equal(plain.mask, deferred.mask) and torch.equal(plain.square, deferred.square)
        assert deferred.tokens.weight.is_meta and deferred.conv.weight.is_meta
        assert isinstance(deferred.linear.weight, nn.Parameter) and deferred.linear.weight.requires_grad
    finally:
        forget()


def test_what_was_not_made_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="was not made in `with syncline"):
        materialise([torch.empty(3, device="meta")])
    with pytest.raises(ConfigError, match="give no generator"), deferred_init():
        torch.empty(3).normal_(generator=torch.Generator())
    forget()
