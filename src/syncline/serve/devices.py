"""Which device a process computes on. Pure: the number of GPUs is an argument."""

from __future__ import annotations

import re

from syncline.errors import ConfigError

_CUDA = re.compile(r"cuda(?::([0-9]{1,3}))?")


def check_device(wanted: str) -> None:
    """ConfigError: this is no device."""
    if wanted not in ("", "auto", "cpu") and _CUDA.fullmatch(wanted) is None:
        raise ConfigError(f"--device {wanted!r}: give cpu, cuda, cuda:N or auto")


def device_of(wanted: str, number: int, num_gpus: int) -> str:
    """The device of process `number`, which sees so many GPUs; '': where the module was made. Processes take the GPUs
    in turn. ConfigError: there is no such GPU.
    """
    check_device(wanted)
    found = _CUDA.fullmatch(wanted)
    if wanted == "auto":
        return f"cuda:{number % num_gpus}" if num_gpus else "cpu"
    if found is None:
        return wanted
    if not num_gpus:
        raise ConfigError(
            f"--device {wanted}: torch sees no GPU here; see nvidia-smi and CUDA_VISIBLE_DEVICES, or serve with "
            "--device cpu"
        )
    if found[1] is None:
        return f"cuda:{number % num_gpus}"
    if int(found[1]) >= num_gpus:
        raise ConfigError(f"--device {wanted}: torch sees {num_gpus} GPUs here, cuda:0 to cuda:{num_gpus - 1}")
    return f"cuda:{int(found[1])}"
