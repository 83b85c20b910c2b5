"""`syncline export`: trained weights for use without Syncline."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from syncline.cli.model_options import InputOption, PickOption
from syncline.errors import ConfigError
from syncline.launch.folder import JOURNAL
from syncline.report.reading import read_run
from syncline.store import weights
from syncline.store.checkpoints import POINTERS, pointed
from syncline.store.disk import MANIFEST
from syncline.store.folders import open_folder
from syncline.store.series import SERIES

if TYPE_CHECKING:
    from syncline.serve.exporting import TracedModel

#: Where in a run's folder its checkpoints often are.
_OF_A_RUN = "checkpoints"


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="A run's folder, a folder of checkpoints, or one of them; any path fsspec knows. Or a .safetensors "
            "file.",
        ),
    ],
    safetensors: Annotated[
        str, typer.Option(metavar="FILE", help="Write the weights as safetensors, by the model's own names.")
    ] = "",
    state_dict: Annotated[
        str, typer.Option(metavar="FILE", help="Write the weights as a state_dict for torch.load.")
    ] = "",
    onnx: Annotated[
        str, typer.Option(metavar="FILE", help="Write the model as ONNX, for any number of rows. Needs --model.")
    ] = "",
    torch_export: Annotated[
        str,
        typer.Option(metavar="FILE", help="Write the model for torch.export.load, e.g. model.pt2. Needs --model."),
    ] = "",
    model: Annotated[
        str,
        typer.Option(metavar="FILE.py:NAME", help="The class or function in your file that makes the model."),
    ] = "",
    inputs: InputOption = None,
    pick: PickOption = "best",
    average: Annotated[bool, typer.Option("--average", help="The average that --average ema:DECAY keeps.")] = False,
) -> None:
    """Writes trained weights, or the model with them, to files that need no Syncline.

    ONNX and torch.export hold the forward of the module, not preprocess, predict and postprocess of your file.

    Example:  syncline export runs/mnist --model model.py:Net --onnx model.onnx
    """
    if not (safetensors or state_dict or onnx or torch_export):
        raise ConfigError("say what to write: --safetensors, --state-dict, --onnx or --torch-export FILE")
    if pick not in ("best", "last"):
        raise ConfigError(f"--pick {pick}: must be best or last")
    for option, name in (("--onnx", onnx), ("--torch-export", torch_export)):
        if name and not model:
            raise ConfigError(
                f"{option} writes the model itself: name your file and what makes it, --model model.py:Net"
            )
    if model and not (onnx or torch_export):
        raise ConfigError("--model is for --onnx and --torch-export; weights alone need none")
    is_file = source.endswith(".safetensors")
    if is_file and (safetensors or state_dict or average):
        raise ConfigError(f"{source} is a file of weights already; give --onnx or --torch-export, or a checkpoint")
    url = source if is_file else chosen(source, pick)
    which = weights.AVERAGE if average else ""
    if safetensors:
        path = pathlib.Path(safetensors).absolute()
        weights.export(url, path, which)
        _say(path, safetensors)
    if state_dict:
        from syncline.torch.weights import export_state_dict  # torch only where it is needed

        path = pathlib.Path(state_dict).absolute()
        export_state_dict(url, path, which)
        _say(path, state_dict)
    if not model:
        return
    traced = _traced(url, which, model, inputs or [], is_file=is_file)
    if torch_export:
        path = pathlib.Path(torch_export).absolute()
        _say(path, torch_export, f"differs from the module by {traced.save_torch_export(path):.1e} at most")
    if onnx:
        path = pathlib.Path(onnx).absolute()
        difference = traced.save_onnx(path)
        checked = "not run: onnxruntime is not installed"
        if difference is not None:
            checked = f"differs from the module by {difference:.1e} at most, in onnxruntime"
        _say(path, onnx, checked)


def chosen(source: str, pick: str) -> str:
    """The checkpoint, or the folder of such, that a path means: of a run the folder it saves in, of that the best."""
    folder = open_folder(source)
    if not folder.exists(MANIFEST) and folder.name not in POINTERS:
        if folder.join(_OF_A_RUN).list():
            source = os.path.join(source, _OF_A_RUN)
        elif folder.exists(SERIES) or folder.exists(JOURNAL):
            saves = read_run(pathlib.Path(source)).settings.get("checkpoint")
            if not saves:
                raise ConfigError(f"the run in {source} has saved nothing: it had no --checkpoint DIR")
            source = str(saves)
        if pick == "best" and pointed(open_folder(source), "best") is not None:
            return os.path.join(source, "best")
    return source


def _traced(url: str, which: str, model: str, inputs: list[str], *, is_file: bool) -> TracedModel:
    try:
        from syncline.serve.exporting import TracedModel
    except ImportError as error:
        raise ConfigError(f"--onnx and --torch-export need torch: pip install 'syncline[torch]' ({error})") from error
    from syncline.serve.datatypes import parse_spec
    from syncline.serve.model import ModelFile
    from syncline.serve.reading import TensorFileSource

    file = ModelFile(model)
    saved = TensorFileSource(pathlib.Path(url)).read() if is_file else weights.load(url, None, which)
    return TracedModel(file, saved, url, [parse_spec(text) for text in inputs])


def _say(path: pathlib.Path, given: str, more: str = "") -> None:
    typer.echo(f"{given}: {_size(path.stat().st_size)}{f', {more}' if more else ''}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.3g} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / 1024:.3g} KiB"
