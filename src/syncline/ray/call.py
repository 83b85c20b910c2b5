"""What workers of `syncline.ray.run` run: `python -m syncline.ray.call MODULE|FILE.py FUNCTION ARGUMENTS DATA`"""

from __future__ import annotations

import functools
import importlib
import runpy
import sys
from typing import Any

import msgspec

from syncline.ray.data import RayBlocks, tell


def main() -> None:
    where, name, said, data = sys.argv[1:]
    if blocks := msgspec.json.decode(data, type=dict[str, RayBlocks]):
        tell(blocks)
    scope: Any = (
        runpy.run_path(where, run_name="__workers__") if where.endswith(".py") else importlib.import_module(where)
    )
    first, *others = name.split(".")
    found = scope[first] if isinstance(scope, dict) else getattr(scope, first)
    functools.reduce(getattr, others, found)(**msgspec.json.decode(said))


if __name__ == "__main__":
    main()
