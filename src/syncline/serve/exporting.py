"""A torch module with saved weights, as a program that runs without its Python file: ONNX, or torch.export."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from syncline.errors import ConfigError, StoreError
from syncline.serve.datatypes import Array, TensorSpec
from syncline.serve.model import ModelFile, SavedWeights, named_outputs
from syncline.serve.torch_model import is_module, load_weights
from syncline.store.weights import replaced

#: What an exported program may differ from the module, beside the largest output.
TOLERANCE = 1e-4
#: One ONNX file is a protobuf message, which cannot be larger.
_MOST_ONNX_BYTES = (2 << 30) - (16 << 20)


class TracedModel:
    """The module of an operator's file with weights, and a batch that it takes."""

    def __init__(self, file: ModelFile, weights: SavedWeights, where: str, said: Sequence[TensorSpec] = ()) -> None:
        """`said`: the inputs, as with `syncline serve --input`; else those of the file's `example`."""
        module = file.make()
        if not is_module(module):
            raise ConfigError(
                f"{file.where} makes a {type(module).__name__}; only torch modules can be exported as a program"
            )
        load_weights(module, weights, where)
        self._where = file.where
        self._module: nn.Module = module.cpu().eval().requires_grad_(False)  # a file may make it on a GPU
        specs = file.inputs(module, said)
        example = file.example(specs)
        if example is None:
            raise ConfigError(
                f"{file.where}: which batches does the model take? Define `example` in the file, or give "
                "--input NAME:TYPE:SHAPE with all lengths"
            )
        # A batch of one row would make the program one for single rows.
        self._inputs = {
            name: torch.from_numpy(np.concatenate([array, array]) if len(array) == 1 else np.array(array))
            for name, array in example.items()
        }
        try:
            self._expected = self._called(self._module)
        except Exception as error:  # the operator's code
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in self._inputs.items())
            first = next(iter(str(error).splitlines()), "")
            raise ConfigError(
                f"{file.where} does not take the batch {shapes}: {type(error).__name__}: {first[:300]}; correct "
                "`example` or --input"
            ) from error

    def save_torch_export(self, path: pathlib.Path) -> float:
        """Writes what `torch.export.load` reads; returns the largest difference to the module."""
        program = self._traced()
        difference = self._difference(self._called(program.module()), path)
        with replaced(path) as part, open(part, "wb") as file:
            torch.export.save(program, file)
            file.flush()
            os.fsync(file.fileno())
        return difference

    def save_onnx(self, path: pathlib.Path) -> float | None:
        """Writes an ONNX file; returns the largest difference to the module, None if onnxruntime is missing."""
        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"--onnx needs {package}: pip install 'syncline[onnx]'")
        num_bytes = sum(tensor.nbytes for tensor in self._module.state_dict().values())
        if num_bytes > _MOST_ONNX_BYTES:
            raise ConfigError(f"the model has {num_bytes:,} bytes, and one ONNX file takes 2 GiB; use --torch-export")
        names = list(self._inputs)
        outputs = list(named_outputs(self._expected, np.asarray))
        with self._explained("ONNX"):
            program: Any = torch.onnx.export(
                self._traced(), input_names=names, output_names=outputs, dynamo=True, verbose=False
            )
        with replaced(path) as part:
            with self._explained("ONNX"):
                program.save(str(part), external_data=False)
            difference = None
            if importlib.util.find_spec("onnxruntime") is not None:
                with self._explained("ONNX"):
                    answered = self._run_onnx(part)
                difference = self._difference(answered, path)
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        return difference

    def _traced(self) -> torch.export.ExportedProgram:
        batch = torch.export.Dim("batch")
        shapes = tuple({0: batch} for _ in self._inputs)
        with self._explained("a program"):
            return torch.export.export(self._module, tuple(self._inputs.values()), dynamic_shapes=shapes)

    def _called(self, module: Any) -> Any:
        with torch.inference_mode():
            found = module(*self._inputs.values())
        if isinstance(found, Mapping):
            return {name: value.cpu().numpy() for name, value in found.items()}
        return [value.cpu().numpy() for value in found] if isinstance(found, tuple | list) else found.cpu().numpy()

    def _run_onnx(self, path: pathlib.Path) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
        given = {one.name: self._inputs[one.name].numpy() for one in session.get_inputs()}
        return session.run(None, given)

    def _difference(self, found: Any, path: pathlib.Path) -> float:
        """The largest difference to the module's outputs. StoreError: the program computes something else."""
        expected = list(named_outputs(self._expected, np.asarray).values())
        got: list[Array] = list(named_outputs(found, np.asarray).values())
        if [array.shape for array in got] == [array.shape for array in expected]:
            pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(got, expected, strict=True)]
            differences = [float(np.abs(a - b).max(initial=0.0)) for a, b in pairs]
            largest = max([1.0, *(float(np.abs(b).max(initial=0.0)) for _, b in pairs)])
            if max(differences) <= TOLERANCE * largest:
                return max(differences)
        raise StoreError(f"{path}: the exported program does not compute what {self._where} does; it is not written")

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
        levels = [logger.level for logger in loggers]
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except (ConfigError, StoreError):
            raise
        except Exception as error:  # what torch says of the operator's code
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            raise ConfigError(
                f"{self._where} cannot become {what}: {type(error).__name__}: {first[:400]}; forward must not depend "
                "on values or on the number of rows (see torch.export)"
            ) from error
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
