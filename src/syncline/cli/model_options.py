"""Options that `syncline serve` and `syncline export` share: which weights, and what the model takes."""

from __future__ import annotations

from typing import Annotated

import typer

PickOption = Annotated[
    str, typer.Option("--pick", help="Of a folder: best (the newest, if none is marked as best) or last.")
]
InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME:TYPE:SHAPE",
        help="What the model takes, of one row: image:FP32:1,28,28. Repeat for several. [default: by `example` of "
        "the file]",
    ),
]
