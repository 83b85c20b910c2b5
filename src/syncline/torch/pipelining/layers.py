"""Layers: a torch model as an ordered list of layers between which it can be cut.

The model is traced at the level of its modules: `nn.Sequential` and the model's own `forward` are looked into, all
other modules are whole. A layer begins at a module with parameters; what follows it (activations, pooling, arithmetic
of the model's `forward`) belongs to it. So an in-place ReLU never stands at the beginning of a stage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import linecache
import operator
import pathlib
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from syncline.errors import ConfigError

#: Whatever is found where tensors lie: kept in the metadata of a operation.
_VALUE = "syncline_value"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer, and what it holds by the names of the whole model. A tied parameter has its first name everywhere."""

    name: str  #: path of the module with which it begins
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayeredModel:
    """A model as layers. `stage()` makes a module of some of them."""

    layers: tuple[Layer, ...]
    how: str  #: traced, or stages: the script gave them
    model: torch.nn.Module
    groups: tuple[tuple[torch.fx.Node, ...], ...] = ()  #: of a traced model, the operations of each layer
    given: tuple[torch.nn.Module, ...] = ()  #: the stages of the script

    def place_of(self, module: str) -> int | None:
        """The layer that a module begins with: its own, or the first one inside it. None: it begins inside one."""
        names = (layer.name for layer in self.layers)
        return next((k for k, name in enumerate(names) if name == module or name.startswith(f"{module}.")), None)

    def stage(self, first: int, last: int) -> torch.nn.Module:
        """The layers[first:last] as a module. It shares parameters and their names with the model.

        It takes what the layers before give it, one tensor or several, and returns what later ones need.
        """
        if self.given:
            return GivenStages(self.given, first, last)
        return _extracted(self.model, self.groups, first, last)


class GivenStages(torch.nn.Module):
    """Some of the stages that a script gave, one after another, under their numbers."""

    def __init__(self, given: Sequence[torch.nn.Module], first: int, last: int) -> None:
        super().__init__()
        for index in range(first, last):
            self.add_module(str(index), given[index])

    def forward(self, *values: Any) -> Any:
        output: Any = values
        for stage in self.children():
            output = stage(*output) if isinstance(output, tuple) else stage(output)
        return output


def find_layers(
    model: torch.nn.Module | None,
    example: Sequence[torch.Tensor],
    *,
    cut_before: Sequence[str] = (),
    stages: Sequence[torch.nn.Module] = (),
    computes: bool = True,
) -> LayeredModel:
    """The layers of a model, by tracing it with this example; or the stages that a script gave, each as one layer.

    Shapes that the model's `forward` reads become constants: trace with an example of the size that is computed.
    `cut_before` may name modules inside others, which are then looked into. `computes`: the model computes the
    example meanwhile, so that its modules may branch by what they compute; else only shapes are followed.
    """
    if stages:
        whole = torch.nn.Sequential(*stages)
        layers = tuple(
            _layer(
                whole, f"stages[{index}]", [f"{index}.{name}".rstrip(".") for name, _ in stage.named_modules()], []
            )
            for index, stage in enumerate(stages)
        )
        return LayeredModel(layers=layers, how="stages", model=whole, given=tuple(stages))
    assert model is not None
    modules = dict(model.named_modules())
    for name in cut_before:
        if name not in modules or not name:
            raise ConfigError(f"cut_before: the model has no module {name!r}")
    graph = _traced(model, example, cut_before, computes=computes)
    groups, names = _grouped(model, graph, cut_before)
    layers = tuple(
        _layer(
            model,
            name,
            [
                path
                for operation in group
                if operation.op == "call_module"
                for path in _inside(model, str(operation.target))
            ],
            [
                str(source.target)
                for operation in group
                for source in operation.all_input_nodes
                if source.op == "get_attr"  # it stands where it was read first
            ],
        )
        for name, group in zip(names, groups, strict=True)
    )
    layered = LayeredModel(layers=layers, how="traced", model=model, groups=groups)
    if missing := [name for name in cut_before if layered.place_of(name) is None]:
        raise ConfigError(
            f"cut_before: the model cannot be cut before {missing[0]!r}; it can be before {', '.join(names[1:])}"
        )
    return layered


def _inside(model: torch.nn.Module, path: str) -> list[str]:
    return [f"{path}.{name}" if name else path for name, _ in model.get_submodule(path).named_modules()]


def _layer(model: torch.nn.Module, name: str, modules: Sequence[str], attributes: Sequence[str]) -> Layer:
    """What these modules, and these attributes of the model, hold."""
    parameters: dict[str, None] = {}
    buffers: dict[str, None] = {}
    first_names = {id(tensor): each for each, tensor in model.named_parameters()}
    buffer_names = {id(tensor): each for each, tensor in model.named_buffers()}
    paths = [(path, own) for path in dict.fromkeys(modules) for own in _own_tensors(model.get_submodule(path), path)]
    tensors = [own for _, own in paths] + [(each, _attribute(model, each)) for each in attributes]
    for _, tensor in tensors:
        if id(tensor) in first_names:
            parameters[first_names[id(tensor)]] = None
        elif id(tensor) in buffer_names:
            buffers[buffer_names[id(tensor)]] = None
    return Layer(name=name, parameters=tuple(parameters), buffers=tuple(buffers))


def _own_tensors(module: torch.nn.Module, path: str) -> list[tuple[str, torch.Tensor]]:
    named = [*module.named_parameters(recurse=False, remove_duplicate=False), *module.named_buffers(recurse=False)]
    return [(f"{path}.{name}", tensor) for name, tensor in named]


def _attribute(model: torch.nn.Module, path: str) -> Any:
    return operator.attrgetter(path)(model)


class _ShapedProxy(torch.fx.Proxy):
    """A value of the traced model whose shape, type and device are known, as they are for the example."""

    def _known(self) -> Any:
        return self.node.meta.get(_VALUE)

    @property
    def shape(self) -> Any:
        return self._known().shape

    @property
    def dtype(self) -> Any:
        return self._known().dtype

    @property
    def device(self) -> Any:
        return self._known().device

    @property
    def ndim(self) -> int:
        return int(self._known().ndim)

    def size(self, *dim: int) -> Any:
        return self._known().size(*dim)

    def dim(self) -> int:
        return int(self._known().dim())

    def numel(self) -> int:
        return int(self._known().numel())

    def __len__(self) -> int:
        return len(self._known())

    def __iter__(self) -> Any:
        return iter([operator.getitem(self, index) for index in range(len(self))])


class _ModuleTracer(torch.fx.Tracer):
    """Looks into the model's own forward, into `nn.Sequential`, and into what has a module to cut before in it.

    It computes the example along the way, so that the model may branch by it; with a model on `meta` only shapes.
    """

    def __init__(
        self, example: Sequence[torch.Tensor], cut_before: Sequence[str], fake: FakeTensorMode | None
    ) -> None:
        super().__init__()
        self._example, self._cut_before, self._fake = list(example), cut_before, fake
        self._device = example[0].device if example else torch.device("cpu")
        self._is_computing = False  # modules are called for their values, and are not traced

    def call_module(self, m: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self._is_computing:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._is_computing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        inside = any(name.startswith(f"{module_qualified_name}.") for name in self._cut_before)
        return not inside and not isinstance(m, torch.nn.Sequential)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Arguments that the example does not have keep their defaults."""
        number = len(self._example)
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        parameters = list(inspect.signature(root_fn).parameters.values())
        if len(args) <= number:
            raise ConfigError(f"Pipeline: the model takes {len(args) - 1} inputs, and the example has {number}")
        for place in range(number + 1, len(args)):
            default = parameters[place].default if place < len(parameters) else inspect.Parameter.empty
            if default is inspect.Parameter.empty:
                name = parameters[min(place, len(parameters) - 1)].name
                raise ConfigError(f"Pipeline: the model takes an input {name!r} that the example does not have")
            self.graph.erase_node(args[place].node)
            args[place] = default
        return function, args

    def proxy(self, operation: torch.fx.Node) -> torch.fx.Proxy:
        if operation.op == "placeholder":
            operation.meta[_VALUE] = self._copied(self._example.pop(0)) if self._example else None
        elif operation.op != "output":
            self._value_of(operation)
        return _ShapedProxy(operation, self)

    def _value_of(self, operation: torch.fx.Node) -> Any:
        """What it computes with this example."""
        if _VALUE not in operation.meta:
            before, self._is_computing = self._is_computing, True
            try:
                operation.meta[_VALUE] = self._computed(operation)
            finally:
                self._is_computing = before
        return operation.meta[_VALUE]

    def _computed(self, operation: torch.fx.Node) -> Any:
        args, kwargs = torch.fx.node.map_arg((operation.args, operation.kwargs), self._value_of)
        with self._fake or contextlib.nullcontext(), torch.no_grad():
            if operation.op == "call_module":
                module = self.root.get_submodule(str(operation.target))
                # Running means and the like stay as they are.
                state = {name: self._copied(buffer) for name, buffer in module.named_buffers()}
                if self._fake is not None:
                    named = module.named_parameters(remove_duplicate=False)
                    state.update({name: self._copied(parameter) for name, parameter in named})
                return torch.func.functional_call(module, state, args, kwargs)
            if operation.op == "get_attr":
                value = _attribute(self.root, str(operation.target))
                return self._copied(value) if isinstance(value, torch.Tensor) else value
            if operation.op == "call_method":
                return getattr(args[0], str(operation.target))(*args[1:], **kwargs)
            assert callable(operation.target)
            return operation.target(*args, **kwargs)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._fake is None:
            return tensor.detach().clone()
        with self._fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)


def _traced(
    model: torch.nn.Module, example: Sequence[torch.Tensor], cut_before: Sequence[str], *, computes: bool
) -> torch.fx.Graph:
    has_numbers = all(parameter.device.type != "meta" for parameter in model.parameters())
    fake = None if computes and has_numbers else FakeTensorMode(allow_non_fake_inputs=True)
    tracer = _ModuleTracer(example, cut_before, fake)
    try:
        with torch.random.fork_rng(devices=[]):
            return tracer.trace(model)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"Pipeline: {type(model).__name__} cannot be traced: {_place(error)}: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}; give the stages yourself: "
            "Pipeline(stages=[front, back], loss_fn=…); or, if that line is inside a submodule, cut beside it: "
            'cut_before=["blocks.6"]'
        ) from error


def _place(error: BaseException) -> str:
    """The last line of the model's own code."""
    ours, torchs = str(pathlib.Path(__file__)), str(pathlib.Path(torch.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != ours and not frame.filename.startswith((torchs, "<"))
    ]
    if not frames:
        return "in its forward"
    frame = frames[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{pathlib.Path(frame.filename).name}, line {frame.lineno} ({line})"


def _grouped(
    model: torch.nn.Module, graph: torch.fx.Graph, cut_before: Sequence[str]
) -> tuple[tuple[tuple[torch.fx.Node, ...], ...], list[str]]:
    """The operations of each layer. What does not depend on inputs or parameters is copied to wherever it is used."""
    groups: list[list[torch.fx.Node]] = [[]]
    names: list[str] = [""]
    count: dict[str, int] = {}
    for operation in graph.nodes:
        if operation.op in ("placeholder", "output") or _is_constant(operation):
            continue
        if operation.op == "call_module":
            path = str(operation.target)
            count[path] = count.get(path, 0) + 1
            begins = path in cut_before or any(True for _ in model.get_submodule(path).parameters())
            name = path if count[path] == 1 else f"{path}@{count[path]}"
            if not names[-1]:
                names[-1] = name
            elif begins:
                groups.append([])
                names.append(name)
        groups[-1].append(operation)
    if not names[0]:
        raise ConfigError(f"Pipeline: {type(model).__name__} calls no module in its forward, so it cannot be cut")
    return tuple(map(tuple, groups)), names


def _is_constant(operation: torch.fx.Node) -> bool:
    """Whether it is the same in every step: made of numbers and buffers by plain functions."""
    if operation.op == "get_attr":
        return False
    return operation.op in ("call_function", "call_method") and not operation.all_input_nodes


def _extracted(
    model: torch.nn.Module, groups: Sequence[Sequence[torch.fx.Node]], first: int, last: int
) -> torch.fx.GraphModule:
    """A module of its own of the operations of some layers."""
    graph_of_all = groups[0][0].graph
    own = [operation for group in groups[first:last] for operation in group]
    has_attribute = {operation for operation in graph_of_all.nodes if operation.op == "get_attr"}
    inputs = (
        _crossing(groups, first)
        if first
        else [operation for operation in graph_of_all.nodes if operation.op == "placeholder"]
    )
    graph = torch.fx.Graph()
    there: dict[torch.fx.Node, torch.fx.Node] = {}
    for operation in inputs:
        there[operation] = graph.placeholder(operation.name)

    def reach(operation: torch.fx.Node) -> torch.fx.Node:
        """Constants, and tensors of the model itself, are made where they are needed."""
        if operation not in there:
            assert operation in has_attribute or _is_constant(operation), operation
            there[operation] = graph.node_copy(operation, reach)
        return there[operation]

    for operation in own:
        if operation not in there:
            there[operation] = graph.node_copy(operation, reach)
    if last == len(groups):
        (output,) = next(operation for operation in graph_of_all.nodes if operation.op == "output").args
        graph.output(torch.fx.node.map_arg(output, reach))
    else:
        values = tuple(reach(operation) for operation in _crossing(groups, last))
        graph.output(values[0] if len(values) == 1 else values)
    made = torch.fx.GraphModule(model, graph)
    buffers = {name for name, _ in model.named_buffers(recurse=False)}
    for name, value in [one for one in made.named_buffers(recurse=False) if one[0] not in buffers]:
        delattr(made, name)
        made.__dict__[name] = value  # a constant of the trace: the model has no such buffer
    return made


def _crossing(groups: Sequence[Sequence[torch.fx.Node]], place: int) -> list[torch.fx.Node]:
    """What is made before this cut and used behind it, in the order in which it is made."""
    graph = groups[0][0].graph
    behind = {operation for group in groups[place:] for operation in group}
    behind.update(operation for operation in graph.nodes if operation.op == "output")
    return [
        operation
        for operation in graph.nodes
        if operation not in behind
        and operation.op != "get_attr"
        and not _is_constant(operation)
        and any(user in behind for user in operation.users)
    ]
