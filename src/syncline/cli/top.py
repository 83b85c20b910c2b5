"""`syncline top`: a running job, live in the terminal."""

from __future__ import annotations

import functools
import importlib.util
import sys

from syncline.cli.status import JobArgument, RunsOption, find
from syncline.errors import ConfigError
from syncline.top.looking import Looking


def top(job: JobArgument, runs: RunsOption = None) -> None:
    """Shows a running job live in the terminal.

    A line for each member: s and S sort by the next or the previous column, r reverses, Enter looks at one member,
    l reads its log, Escape goes back, q ends the view. The job goes on. Needs the extra `top`.

    Example:  syncline top train-20250101-120000
    """
    file = find(job, runs)
    if importlib.util.find_spec("textual") is None:
        raise ConfigError("the view needs the extra: pip install 'syncline[top]'; or use syncline status")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("the view needs a terminal; syncline status prints lines")
    from syncline.top.app import Top

    Top(file.folder.name, functools.partial(Looking, file), file.folder).run()
