"""The checks of `syncline doctor`: what a check is, what is installed, and what the machine has."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import pathlib
import platform
import resource
import shutil
import sys
from collections.abc import Callable
from typing import Any, Literal

from syncline import config as configuration
from syncline.core.units import counted
from syncline.errors import SynclineError
from syncline.net import shm

GIB = 1 << 30
#: Enough for a job of a hundred members with a few connections and arenas each.
_FEW_FILES = 1024


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check. Warning: it works with restrictions; problem: it does not work. Both have a remedy."""

    level: Literal["ok", "warning", "problem"]
    text: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing to check."""

    name: str
    look: Callable[[], Finding]

    def run(self) -> Finding:
        """Runs the check; an unexpected exception is a problem too."""
        try:
            return self.look()
        except SynclineError as error:
            return Finding("problem", str(error), "correct what this names")
        except Exception as error:
            return Finding("problem", f"{type(error).__name__}: {error}", "please report this, with this line")


# -- what is installed --------------------------------------------------------------------------------------


def python() -> Finding:
    """An older Python does not get this far."""
    return Finding("ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def torch() -> Finding:
    try:
        module: Any = importlib.import_module("torch")
        module.zeros(1).add_(1)
    except ModuleNotFoundError:
        remedy = "pip install 'syncline[torch]', unless your workers use another framework"
        return Finding("ok", f"not installed: servers compute with NumPy; {remedy}")
    except Exception as error:  # a broken build may raise anything
        reason = str(error).partition("\n")[0]
        return Finding("problem", f"cannot be used: {type(error).__name__}: {reason}", "install torch 2.4 or newer")
    version = str(module.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 4):
        return Finding("problem", f"{version} is too old", "install torch 2.4 or newer")
    return Finding("ok", f"{version}, {counted(module.get_num_threads(), 'thread')}")


def packages() -> Finding:
    found, missing = [], []
    for name in ("numpy", "msgspec", "cryptography", "typer", "rich"):
        try:
            importlib.import_module(name)
            found.append(f"{name} {importlib.metadata.version(name)}")
        except ImportError as error:  # PackageNotFoundError is one
            missing.append(f"{name} ({error})")
    if missing:
        return Finding("problem", f"missing: {', '.join(missing)}", "make setup, or pip install syncline again")
    return Finding("ok", ", ".join(found))


# -- what the machine has -----------------------------------------------------------------------------------


def cores() -> Finding:
    count = configuration.num_cores()
    if count == 1:
        return Finding("warning", "1: server and workers take turns on it", "allow this process more cores (taskset)")
    return Finding("ok", f"{count} may be used")


def memory() -> Finding:
    available = shm.available_bytes()
    if available is None:
        return Finding("ok", "unknown here: too little shows when a job starts")
    text = f"{available / GIB:.1f} GiB available"
    if available < GIB:
        return Finding("warning", text, "end other programs, or raise this container's memory limit")
    return Finding("ok", text)


def open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding("ok", "no limit")
    if limit < _FEW_FILES:
        return Finding("warning", f"at most {limit} per process", f"ulimit -n {4 * _FEW_FILES}")
    return Finding("ok", f"at most {limit} per process")


def gpus() -> Finding:
    installed = configuration.num_gpus()
    module = sys.modules.get("torch")
    names = [module.cuda.get_device_name(k) for k in range(module.cuda.device_count())] if module else []
    if names:
        return Finding("ok", f"{len(names)}: {', '.join(sorted(set(names)))}")
    if installed:
        remedy = "install a torch with CUDA that fits the driver (see nvidia-smi)"
        return Finding("warning", f"{installed} installed, torch sees none: workers compute on cpu", remedy)
    return Finding("ok", "none: workers compute on cpu")


def disk() -> Finding:
    runs = pathlib.Path(configuration.resolve(configuration.read_toml_here()).runs)
    place = runs.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        remedy = 'say another folder in syncline.toml: runs = "…"'
        return Finding("problem", f"{runs}/ cannot be written, and logs go there", remedy)
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free for {runs}/"
    if free < GIB:
        return Finding("warning", text, "remove old folders under runs/, or say another in syncline.toml")
    return Finding("ok", text)


def fashion_mnist() -> Finding:
    """Checks that the files exist; checksums are verified when they are read."""
    from syncline.data import datasets

    found = datasets.fashion_mnist_folder()
    if found is not None:
        return Finding("ok", "in {}: {}".format(*found))
    text = "not on this machine: the example would download it"
    return Finding("warning", text, f"make data, or {datasets.FASHION_MNIST_REMEDY}")
