"""Readable tracebacks: the user's frames without ours, and one line for errors that are not the user's."""

from __future__ import annotations

import pathlib
import sys
import traceback
from types import TracebackType

from syncline.errors import JobFailed, SynclineError, WrongLauncher

_OURS = str(pathlib.Path(__file__).resolve().parents[1])


def describe(error: BaseException, script: str = "") -> str:
    """The text for an uncaught exception, without the frames that started the script or are ours."""
    name = f"syncline.{type(error).__name__}"
    if isinstance(error, JobFailed | WrongLauncher):
        return f"{name}: {error}\n"
    frames = traceback.extract_tb(error.__traceback__)
    starts = [k for k, frame in enumerate(frames) if script and frame.filename == script]
    shown = frames[starts[0] :] if starts else frames
    if isinstance(error, SynclineError):
        shown = traceback.StackSummary.from_list([f for f in shown if not f.filename.startswith(_OURS)])
        lines = ["Traceback (most recent call last):\n", *shown.format()] if shown else []
        return "".join([*lines, f"{name}: {error}\n"])
    if starts:
        lines = traceback.format_exception(error.with_traceback(_skip(error.__traceback__, starts[0])))
    else:
        lines = traceback.format_exception(error)
    return "".join(lines)


def _skip(trace: TracebackType | None, count: int) -> TracebackType | None:
    for _ in range(count):
        trace = trace.tb_next if trace is not None else None
    return trace


def shorten_tracebacks() -> None:
    """Prints our uncaught errors without our own frames."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SynclineError):
            sys.stderr.write(describe(error))
        else:
            previous(kind, error, trace)

    sys.excepthook = hook
