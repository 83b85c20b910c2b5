"""`syncline.data.open`: a path or a name in, a source out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from syncline.data.arrays import ArraySource, open_numpy
from syncline.data.arrow import open_arrow, open_parquet
from syncline.data.datasets import fashion_mnist, mnist
from syncline.data.files import Files, found
from syncline.data.iris import iris
from syncline.data.saying import say
from syncline.data.source import ShardSource, Source
from syncline.data.tar import TarSource
from syncline.errors import ConfigError

_SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "numpy": (".npy", ".npz"),
    "tar": (".tar", ".tar.gz", ".tgz"),
}
_SPLITS = ("train", "test")
_IMAGE_SETS = {"fashion-mnist": fashion_mnist, "mnist": mnist}


def open_source(
    path_or_name: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    kind: str | None = None,
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Source | ShardSource:
    """The data behind a path (a file, a glob, a folder; on this machine or `s3://`, `memory://`, …) or a name.

    Names are "iris", "mnist" and "fashion-mnist"; the last two have a `split`, "train" (what is taken if none is
    given) or "test". What a path holds is guessed by the suffixes; `kind` says it otherwise: "parquet", "arrow",
    "numpy" or "tar". `columns` chooses columns or fields; `storage_options` go to the driver of a remote path.
    """
    text = os.fspath(path_or_name)
    if isinstance(columns, str):
        raise ConfigError(f"{text}: columns= is a list of names; use columns=[{columns!r}] for this one")
    if kind is None and isinstance(path_or_name, str) and (text == "iris" or text in _IMAGE_SETS):
        if storage_options:
            raise ConfigError(f"{text}: storage_options are for remote paths; leave them out for {text}")
        source: Source | ShardSource = _named(text, columns, split)
    else:
        if split is not None:
            raise ConfigError(
                f"{text}: split= is for {' and '.join(_IMAGE_SETS)}; give the path of the split's files"
            )
        source = _from_files(text, columns, kind, storage_options)
    say(f"{text}: taken as {source.describe()}")
    return source


def _named(name: str, columns: Sequence[str] | None, split: str | None) -> ArraySource:
    if name == "iris":
        if split is not None:
            raise ConfigError("iris has no splits: leave split= out")
        return iris().only(columns)
    if split is not None and split not in _SPLITS:
        raise ConfigError(f"{name}: there is no split '{split}'; there are {' and '.join(_SPLITS)}")
    images, labels = _IMAGE_SETS[name](split != "test")
    return ArraySource({"image": images, "label": labels}, f"{name} ({split or 'train'})").only(columns)


def _from_files(
    path: str, columns: Sequence[str] | None, kind: str | None, options: Mapping[str, Any] | None
) -> Source | ShardSource:
    if kind is not None and kind not in _SUFFIXES:
        raise ConfigError(f"{path}: kind '{kind}' is not known; known are {', '.join(_SUFFIXES)}")
    suffixes = _SUFFIXES[kind] if kind else tuple(suffix for each in _SUFFIXES.values() for suffix in each)
    files = found(path, suffixes, options)
    opened: dict[str, Callable[[Files], Source | ShardSource]] = {
        "parquet": lambda files: open_parquet(files, columns),
        "arrow": lambda files: open_arrow(files, columns),
        "numpy": lambda files: open_numpy(files).only(columns),
        "tar": lambda files: TarSource(files, columns),
    }
    return opened[kind or _guessed(files)](files)


def _guessed(files: Files) -> str:
    """The kind that all names agree on."""
    kinds: dict[str, str] = {}
    for path in files.paths:
        kind = next((kind for kind, suffixes in _SUFFIXES.items() if path.lower().endswith(suffixes)), None)
        if kind is None:
            raise ConfigError(f"{path}: the file type is not clear from its name; give kind= {', '.join(_SUFFIXES)}")
        kinds.setdefault(kind, path)
    if len(kinds) > 1:
        (first, one), (second, other), *_ = kinds.items()
        raise ConfigError(f"{files.path}: {one} is {first} and {other} is {second}; choose with kind=")
    return next(iter(kinds))
