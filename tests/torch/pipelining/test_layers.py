"""A model as layers: the same numbers wherever it is cut, the names of the whole model, and clear errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncline.errors import ConfigError
from syncline.torch.pipelining.layers import find_layers


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:  # cannot be traced, and is inside a block
            return x
        return x + F.relu(self.linear(self.norm(x)))


class Language(nn.Module):
    """As people write a small GPT: shapes are read, positions made, and the head is the embedding."""

    def __init__(self, num_blocks: int = 4, width: int = 16, words: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, index: Tensor, targets: Tensor | None = None) -> Tensor:
        _, length = index.size()
        assert length <= 64
        first = x = self.words(index) + self.places(torch.arange(0, length, device=index.device))
        for block in self.blocks:
            x = block(x)
        output = self.head(self.norm(x + first) * self.scale)
        return output if targets is None else F.cross_entropy(output.flatten(0, 1), targets.flatten())


def conv() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Sequential(nn.Linear(144, 8), nn.Tanh()), nn.Linear(8, 2),
    )  # fmt: skip


MODELS = {
    "language": (Language, lambda: (torch.randint(0, 32, (4, 8)),)),
    "conv": (conv, lambda: (torch.randn(3, 1, 8, 8),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_compute_what_the_model_does_wherever_it_is_cut(name: str) -> None:
    """Bit-equal, gradients too; a value that is used later than in the next layer passes through."""
    make, example = MODELS[name]
    torch.manual_seed(1)
    model, given = make(), example()
    layered = find_layers(model, given)
    output = model(*given)
    output.sum().backward()
    gradients = {each: parameter.grad.clone() for each, parameter in model.named_parameters()}
    number = len(layered.layers)
    for place in range(1, number):
        model.zero_grad()
        values = layered.stage(0, place)(*given)
        values = values if isinstance(values, tuple) else (values,)
        again = layered.stage(place, number)(*values)
        assert torch.equal(again, output)
        again.sum().backward()
        for each, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[each], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_stages_share_the_parameters_under_the_names_of_the_whole_model(name: str) -> None:
    make, example = MODELS[name]
    model = make()
    layered = find_layers(model, example())
    whole = dict(model.named_parameters(remove_duplicate=False))
    found = set()
    for place in range(len(layered.layers)):
        stage = layered.stage(place, place + 1)
        assert all(whole[each] is parameter for each, parameter in stage.named_parameters())
        found |= {each for each, _ in stage.named_parameters()}
        buffers = {each for each, _ in stage.named_buffers()}
        assert buffers == set(layered.layers[place].buffers) <= {each for each, _ in model.named_buffers()}
    assert found == set(whole)
    assert {each for layer in layered.layers for each in layer.parameters} == {n for n, _ in model.named_parameters()}


def test_layers_begin_at_modules_with_parameters() -> None:
    """ReLU and Flatten belong to the layer before them: no stage begins with an edit in place."""
    assert [layer.name for layer in find_layers(conv(), (torch.randn(3, 1, 8, 8),)).layers] == ["0", "1", "4.0", "5"]
    names = [layer.name for layer in find_layers(Language(2), (torch.randint(0, 32, (4, 8)),)).layers]
    assert names == ["words", "places", "blocks.0", "blocks.1", "norm", "head"]


def test_a_tied_parameter_stands_in_every_layer_that_uses_it() -> None:
    layered = find_layers(Language(1), (torch.randint(0, 32, (4, 8)),))
    assert layered.layers[0].parameters == ("words.weight",) == layered.layers[-1].parameters


def test_tracing_changes_neither_running_means_nor_random_numbers() -> None:
    model = conv()
    model.append(nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    find_layers(model, (torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)),))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_on_meta_is_cut_without_memory() -> None:
    with torch.device("meta"):
        model = conv()
    stage = find_layers(model, (torch.randn(3, 1, 8, 8),)).stage(2, 4)
    assert {name for name, _ in stage.named_parameters()} == {"4.0.weight", "4.0.bias", "5.weight", "5.bias"}
    assert all(parameter.device.type == "meta" for parameter in stage.parameters())


def test_cut_before_looks_into_a_module() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    model = nn.Sequential(Deep(), Deep())
    assert [layer.name for layer in find_layers(model, (torch.randn(2, 4),)).layers] == ["0", "1"]
    inside = find_layers(model, (torch.randn(2, 4),), cut_before=["1.two"])
    assert [layer.name for layer in inside.layers] == ["0", "1.one", "1.two"]


def test_given_stages_are_layers() -> None:
    parts = [nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))]
    layered = find_layers(None, (torch.randn(2, 4),), stages=parts)
    assert layered.how == "stages" and [layer.name for layer in layered.layers] == ["stages[0]", "stages[1]"]
    assert layered.layers[1].parameters == ("1.1.weight", "1.1.bias")
    x = torch.randn(2, 4)
    assert torch.equal(layered.stage(1, 2)(layered.stage(0, 1)(x)), parts[1](parts[0](x)))


def test_a_model_that_cannot_be_traced_names_the_line_and_the_other_ways() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(ConfigError, match=r"test_layers\.py, line \d+ \(if x\.sum\(\) > 0:\)") as caught:
        find_layers(Branching(), (torch.randn(2, 4),))
    assert "stages=[front, back]" in str(caught.value) and "cut_before=" in str(caught.value)


@pytest.mark.parametrize(
    ("example", "options", "words"),
    [
        ((), {}, "takes an input"),
        ((torch.randn(2, 4), torch.randn(2, 4)), {}, "takes 1 inputs, and the example has 2"),
        ((torch.randn(2, 4),), {"cut_before": ["7"]}, "the model has no module '7'"),
    ],
)
def test_what_cannot_be_cut_is_an_error(
    example: tuple[Tensor, ...], options: dict[str, list[str]], words: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=words):
        find_layers(model, example, **options)
