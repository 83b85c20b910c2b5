"""A traced model in a job: the same numbers for every size of micro-batches, without what other processes have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from syncline.errors import ConfigError
from syncline.torch.pipelining.cutting import Chain, Layers
from syncline.torch.pipelining.engine import describe, infer
from syncline.torch.pipelining.holding import Tensors, UnwrittenBuffers, hollow, in_several, share_out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.linear(x)))


class Net(nn.Module):
    """It reads shapes, as `x.view(len(x), -1)` does; its scale is used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], -1) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def chained(parts: list[nn.Module], x: Tensor) -> Tensor:
    output: object = x
    for part in parts:
        output = part(*output) if isinstance(output, tuple) else part(output)
    assert isinstance(output, Tensor)
    return output


def test_parts_compute_what_the_model_does_for_every_size() -> None:
    torch.manual_seed(0)
    net = Net().eval()
    layers = Layers(net, example=(torch.randn(6, 2, 4),))
    assert layers.names == [*(f"blocks.{i}" for i in range(4)), "head"]
    for size in (6, 3, 5, 1, 2, 4, 6):
        x = torch.randn(size, 2, 4)
        assert torch.equal(chained(layers.parts([0, 2, 4], describe([x])), x), net(x))


def test_a_process_traces_without_the_numbers_of_others() -> None:
    """Another batch size comes when a process has let go of what it does not compute with."""
    torch.manual_seed(0)
    net = Net().eval()
    x, other = torch.randn(4, 2, 4), torch.randn(7, 2, 4)
    wanted = net(other)
    layers = Layers(net, example=(x,))
    tensors = Tensors(net)
    first, second = share_out(tensors, layers, [0, 3], 2)
    between = layers.parts([0, 3], describe([other]))[0](other)
    for index in set(first.parameters) - set(second.parameters):
        tensors.parameters[index].data = hollow(tensors.parameters[index])
    layers = Layers(net, example=(x,))
    given = between if isinstance(between, tuple) else (between,)
    assert torch.equal(layers.parts([0, 3], describe([other]))[1](*given), wanted)
    assert infer(layers.parts([0, 3], describe([x]))[0], describe([x]), "")[0].shape == [4, 8]


def test_every_tensor_is_held_once_and_what_no_layer_uses_by_the_first_process() -> None:
    net = Net()
    tensors = Tensors(net)
    held = share_out(tensors, Layers(net, example=(torch.randn(4, 2, 4),)), [0, 1, 2, 3], 2)
    names = [[tensors.names[i] for i in each.parameters] for each in held]
    assert sorted(names[0] + names[1]) == sorted(name for name, _ in net.named_parameters())
    assert "unused.weight" in names[0] and {"blocks.1.norm.bias", "head.weight"} <= set(names[1])
    assert not set(names[0]) & set(names[1])
    assert [tensors.buffer_names[i] for i in in_several(held)] == ["scale"]


def test_a_buffer_of_two_stages_must_not_be_written() -> None:
    net = Net()
    tensors = Tensors(net)
    unwritten = UnwrittenBuffers(tensors, [tensors.buffer_names.index("scale")])
    unwritten.check()
    net.scale.mul_(2.0)
    with pytest.raises(ConfigError, match="the buffer 'scale' is in two stages, and a step writes to it"):
        unwritten.check()
    unwritten.note()
    unwritten.check()
    net.scale = torch.ones(8)
    with pytest.raises(ConfigError, match="is in two stages"):
        unwritten.check()


def test_modes_are_those_of_the_step() -> None:
    """`self.training` in the model's own forward is a constant of a trace."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(nn.functional.dropout(self.one(x), 0.999, training=self.training))

    torch.manual_seed(0)
    net = Dropping()
    x = torch.randn(4, 4)
    layers = Layers(net, example=(x,))
    assert not torch.equal(chained(layers.parts([0, 1], describe([x])), x), net.eval()(x))
    assert torch.equal(chained(layers.parts([0, 1], describe([x])), x), net(x))


def test_cuts_are_where_the_script_says() -> None:
    x = torch.randn(4, 2, 4)
    layers = Layers(Net(), example=(x,), cut_before=["blocks.3", "blocks.1"])
    assert layers.firsts(3) == [0, 1, 3]
    nested = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))
    assert Layers(nested, example=(torch.zeros(2, 4),), cut_before=["2", "1.1"]).firsts(3) == [0, 3, 4]  # 2 is 2.0
    with pytest.raises(ConfigError, match="cut_before names 2 of the 1 cuts that make 2 parts; name 1"):
        layers.firsts(2)
    with pytest.raises(ConfigError, match=r"6 parts need as many layers, and the model has 5"):
        Layers(Net(), example=(x,)).firsts(6)
    with pytest.raises(ConfigError, match=r"no torch.nn.Sequential: give an example .*example=\(x,\).*stages="):
        Layers(Net())
    with pytest.raises(ConfigError, match=r"has no module 'blocks.9'"):
        Layers(Net(), example=(x,), cut_before=["blocks.9"])


def test_given_stages_are_whole() -> None:
    parts = [nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)]
    layers = Layers(Chain(*parts), parts)
    first, second = layers.parts([0, 2], [])
    assert isinstance(first, Chain) and second is parts[2]
    (_, buffers), (parameters, _) = layers.held([0, 2])
    assert [id(p) for p in parameters] == [id(p) for p in parts[2].parameters()] and len(buffers) == 3


def test_an_edit_in_place_across_a_cut_is_refused_at_the_start() -> None:
    class Editing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x += 1.0
            return super().forward(x)

    (meta,) = describe([torch.zeros(2, 4, requires_grad=True)])
    with pytest.raises(ConfigError, match=r"\(Editing\) edits in place what the stage before it gives"):
        infer(Editing(4, 4), [meta], "")
