"""A guarded dict of parameters waits for exactly what is read, and is a plain dict in every other way."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from syncline.torch.guard import Guard, Guarded


class Waits:
    """Remembers which parameters were waited for."""

    def __init__(self, *modules: nn.Module) -> None:
        self.log: list[str] = []
        self.arrived = True  # what a wait answers
        self.by_id: dict[int, Callable[[bool], bool]] = {}
        for number, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                self.by_id[id(parameter)] = self._wait(f"{number}.{name}" if len(modules) > 1 else name)

    def _wait(self, name: str) -> Callable[[bool], bool]:
        def wait(alone: bool) -> bool:
            self.log.append(name)
            return self.arrived

        return wait


def guarded(module: nn.Module) -> tuple[Waits, Guard]:
    waits = Waits(module)
    guard = Guard(module.modules(), waits.by_id)
    guard.arm()
    return waits, guard


READS: list[Callable[[Any], Any]] = [
    lambda linear: linear.weight,
    lambda linear: linear._parameters["weight"],
    lambda linear: linear._parameters.get("weight"),
    lambda linear: linear._parameters.pop("weight"),
    lambda linear: linear._parameters.setdefault("weight", None),
    lambda linear: linear.get_parameter("weight"),
]


@pytest.mark.parametrize("number", range(len(READS)))
def test_one_read_waits_for_one_parameter(number: int) -> None:
    linear = nn.Linear(2, 2)
    weight = linear.weight
    waits, _ = guarded(linear)
    assert READS[number](linear) is weight
    assert waits.log == ["weight"]


BULK_READS: list[Callable[[nn.Module], Any]] = [
    lambda linear: linear(torch.ones(2)),
    lambda linear: list(linear.parameters()),
    lambda linear: linear.state_dict(),
    lambda linear: linear.load_state_dict(nn.Linear(2, 2).state_dict()),
    lambda linear: linear.double(),
    lambda linear: dict(linear._parameters),
    lambda linear: {**linear._parameters},
    lambda linear: linear._parameters.copy(),
    lambda linear: linear._parameters | {},
    lambda linear: {} | linear._parameters,
    lambda linear: list(linear._parameters.values()),
    lambda linear: copy.copy(linear._parameters),
    copy.deepcopy,
    pickle.dumps,
]


@pytest.mark.parametrize("number", range(len(BULK_READS)))
def test_reads_of_everything_wait_for_everything(number: int) -> None:
    linear = nn.Linear(2, 2)
    waits, _ = guarded(linear)
    BULK_READS[number](linear)
    assert set(waits.log) == {"weight", "bias"}


def test_looking_at_names_and_setting_waits_for_nothing() -> None:
    linear = nn.Linear(2, 2)
    waits, _ = guarded(linear)
    assert "weight" in linear._parameters and list(linear._parameters) == ["weight", "bias"]
    assert len(linear._parameters) == 2 and list(linear._parameters.keys()) == ["weight", "bias"]
    linear._parameters["bias"] = nn.Parameter(torch.zeros(2))
    assert waits.log == []


def test_what_has_arrived_is_not_waited_for_again_before_it_is_armed_again() -> None:
    linear = nn.Linear(2, 2)
    waits, guard = guarded(linear)
    for _ in range(3):
        linear.weight.sum()
    assert waits.log == ["weight"]
    waits.arrived = False  # another stream may read it before it is there
    guard.arm()
    for _ in range(3):
        linear.weight.sum()
    assert waits.log == ["weight"] * 4
    guard.remove()
    linear.weight.sum()
    assert waits.log == ["weight"] * 4


@pytest.mark.parametrize("made", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_plain(made: Callable[[nn.Module], nn.Module]) -> None:
    linear = nn.Linear(2, 2)
    guarded(linear)
    other = made(linear)
    assert type(other._parameters) is dict and isinstance(linear._parameters, Guarded)
    assert torch.equal(other.weight, linear.weight) and other.weight is not linear.weight  # type: ignore[arg-type]


def test_tied_weights_and_other_modules_attention() -> None:
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    two.weight = one.weight
    waits, _ = guarded(nn.Sequential(one, two))
    two(torch.ones(2))
    assert waits.log == ["0.weight"]
    attention = nn.MultiheadAttention(2, 1)
    waits, _ = guarded(attention)
    x = torch.ones(1, 2)
    attention(x, x, x)
    assert {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"} == set(waits.log)


def test_a_module_with_a_list_of_parameters_waits_before_its_forward() -> None:
    lstm = nn.LSTM(2, 3)
    waits, guard = guarded(lstm)
    lstm(torch.ones(1, 2))
    assert len(set(waits.log)) == 4
    guard.remove()
    waits.log.clear()
    lstm(torch.ones(1, 2))
    assert waits.log == []


def test_two_optimizers_guard_one_module() -> None:
    linear = nn.Linear(2, 2)
    one, two = Waits(linear), Waits(linear)
    first = Guard([linear], {id(linear.weight): one.by_id[id(linear.weight)]})
    second = Guard([linear], {id(linear.bias): two.by_id[id(linear.bias)]})
    first.arm()
    second.arm()
    linear(torch.ones(2))
    assert one.log == ["weight"] and two.log == ["bias"]
    first.arm()
    second.arm()
    first.remove()
    linear(torch.ones(2))
    assert one.log == ["weight"] and two.log == ["bias", "bias"]


def test_functional_call_puts_others_in_their_place_and_back() -> None:
    linear = nn.Linear(2, 2)
    own = linear.weight
    guarded(linear)
    zeros = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    assert torch.func.functional_call(linear, zeros, (torch.ones(2),)).tolist() == [0.0, 0.0]
    assert linear.weight is own


@pytest.mark.parametrize("how", ["before", "after", "in place"])
def test_compiled_code_reads_past_a_guard_and_that_is_known(how: str) -> None:
    linear = nn.Linear(2, 2)
    model: Any = torch.compile(linear, backend="eager") if how == "before" else linear
    if how == "in place":
        linear.compile(backend="eager")
    waits = Waits(linear)
    guard = Guard(model.modules(), waits.by_id)
    guard.arm()
    assert guard.compiled == (how != "after")
    if how == "after":
        model = torch.compile(linear, backend="eager")
        model(torch.ones(2))
        assert guard.compiled and set(waits.log) == {"weight", "bias"}
    del guard
    torch._dynamo.reset()
    gc.collect()


def test_scripted_modules_are_left_alone() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    waits = Waits(scripted)
    guard = Guard(scripted.modules(), waits.by_id)
    assert guard.guarded == set()
