"""Kernels without their optimizer: bit for bit what the optimizer does, through every change of its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.core.rule import RuleSpec
from syncline.server import torch_rules as rules
from syncline.server.torch_rules import FusedKernel, make_optimizer

RULES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    ("Adam", {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1, "amsgrad": True, "maximize": True}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.3, "amsgrad": True}),
]


def two_alike(name: str, options: dict[str, Any]) -> list[tuple[list[torch.Tensor], torch.optim.Optimizer]]:
    made = []
    for _ in range(2):
        chance = torch.Generator().manual_seed(3)
        parameters = [torch.randn(size, generator=chance) for size in (5, 40, 1)]
        made.append((parameters, make_optimizer(RuleSpec(name, options), parameters)))
    return made


def step_plainly(parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, grads, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize(("name", "options"), RULES)
def test_a_kernel_does_what_its_optimizer_does(name: str, options: dict[str, Any]) -> None:
    (ours, optimizer), (theirs, plain) = two_alike(name, options)
    kernel, by_kernel = FusedKernel(optimizer), 0
    chance = torch.Generator().manual_seed(4)
    for number in range(6):
        grads = [torch.randn(p.shape, generator=chance) for p in ours]
        for made in (optimizer, plain):
            made.param_groups[0]["lr"] = 0.1 / (1 + number)
        if kernel.step(grads, optimizer.param_groups[0]):
            by_kernel += 1
        else:
            step_plainly(ours, optimizer, grads)
        step_plainly(theirs, plain, grads)
        for one, two in zip(ours, theirs, strict=True):
            assert torch.equal(one, two)
    assert by_kernel >= 5  # all but the first, which makes the state


@pytest.mark.parametrize(
    ("name", "change"), [("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True})], ids=["momentum", "amsgrad"]
)
def test_what_needs_state_that_is_not_there_is_left_to_the_optimizer(name: str, change: dict[str, Any]) -> None:
    (ours, optimizer), _ = two_alike(name, {"lr": 0.1})
    kernel, grads = FusedKernel(optimizer), [torch.ones_like(p) for p in two_alike(name, {"lr": 0.1})[0][0]]
    step_plainly(ours, optimizer, grads)
    assert kernel.step(grads, optimizer.param_groups[0])
    before = [p.clone() for p in ours]
    assert not kernel.step(grads, {**optimizer.param_groups[0], **change})
    assert all(torch.equal(one, two) for one, two in zip(ours, before, strict=True))


@pytest.mark.parametrize("num_items", [10, rules.SMALL_ITEMS + 1])
def test_the_number_of_threads_is_what_it_was(num_items: int) -> None:
    """A small update borrows one thread; the script's own work gets its threads back, also after an error."""
    parameter = torch.zeros(num_items)
    kernel = FusedKernel(make_optimizer(RuleSpec("SGD", {"lr": 1.0}), [parameter]))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert kernel.step([torch.ones(num_items)], kernel_settings())
        assert torch.get_num_threads() == 3 and (parameter == -1).all()
        with pytest.raises(RuntimeError):
            kernel.step([torch.ones(num_items), torch.ones(1)], kernel_settings())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def kernel_settings() -> dict[str, Any]:
    return {
        "lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sgd_of_halves_is_not_fused_on_a_cpu(dtype: torch.dtype) -> None:
    parameter = torch.zeros(4096, dtype=dtype)
    optimizer = make_optimizer(RuleSpec("SGD", {"lr": 0.125}), [parameter])
    step_plainly([parameter], optimizer, [torch.full((4096,), 0.5, dtype=dtype)])
    assert (parameter == -0.0625).all() and not optimizer.defaults.get("fused")
