"""The models that both sides train: the same parameters in every process, each its own batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks.models import MODELS, backward_step, make, training_step
from benchmarks.task import Task
from benchmarks.transformer import Transformer

TINY = Task(kind="train", model="gpt-tiny")


@pytest.mark.proof
def test_the_transformer_has_about_124_million_parameters():
    assert sum(p.numel() for p in MODELS["gpt"].build().parameters()) == 124_475_904


def test_a_word_sees_only_what_came_before_it():
    torch.manual_seed(0)
    model = Transformer(num_layers=2, width=16, num_heads=2, num_words=32, length=8)
    text = torch.randint(32, (1, 8))
    other = text.clone()
    other[0, 5] = (other[0, 5] + 1) % 32
    changed = (model(text) - model(other)).abs().amax(dim=1) > 0
    assert changed.tolist() == [False] * 5 + [True] * 3


@pytest.mark.proof
def test_the_transformer_learns_in_bfloat16():
    training = make(TINY, seed=0)
    x, y = training.batch
    before = F.cross_entropy(training.model(x), y).item()
    step = training_step(training)
    for _ in range(50):
        step()
    assert {p.dtype for p in training.model.parameters()} == {torch.bfloat16}
    assert F.cross_entropy(training.model(x), y).item() < before - 0.2


def test_processes_have_the_same_parameters_and_batches_of_their_own():
    one, two = make(TINY, seed=0), make(TINY, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))
    assert not torch.equal(one.batch[0], two.batch[0])
    assert torch.equal(one.batch[0][0, 1:], one.batch[1][: 16 - 1])  # each word's target is the next word


def test_gradients_are_still_there_after_a_backward_step():
    training = make(Task(kind="backward", widths=[784, 8, 10]), seed=0)
    seen: list[bool] = []
    step = backward_step(training, lambda: seen.append(all(p.grad is not None for p in training.model.parameters())))
    step()
    first = [p.grad.clone() for p in training.model.parameters() if p.grad is not None]
    step()
    assert seen == [True, True]
    assert all(
        torch.equal(a, b.grad) for a, b in zip(first, training.model.parameters(), strict=True) if b.grad is not None
    )
