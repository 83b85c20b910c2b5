"""Checks user-defined codecs before anything starts, in a process that sees what members will see."""

from __future__ import annotations

import os
import subprocess
import sys

from syncline.config import JobConfig
from syncline.core.codecs.named import codecs_of
from syncline.errors import ConfigError
from syncline.extensions import is_named, load, see_beside
from syncline.launch.hosts import assign
from syncline.launch.processes import LOCAL_HOSTS, describe_exit

_FOUND, _REFUSED = 41, 42  # unlikely exit codes of a user's module
_MARK = "syncline refuses: "


def check_own_codecs(config: JobConfig, script: str) -> None:
    """Raises ConfigError for codecs that members on this host could not load; other hosts have their own files.

    `script`: its path; empty for a module.
    """
    named = [text for text in (config.codec, config.pull_codec) if is_named(text)]
    if not named or LOCAL_HOSTS.isdisjoint(assign(config).values()):
        return
    # The user's module may load frameworks, take a GPU, or exit: it must not run in the launcher.
    words = [sys.executable, "-m", __name__, script, config.codec, config.pull_codec]
    try:
        done = subprocess.run(
            words,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=config.start_seconds,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{', '.join(named)}: not imported within {config.start_seconds:g} s") from None
    if done.returncode == _REFUSED:
        said = done.stdout.decode(errors="replace").rpartition(_MARK)[2]
        raise ConfigError(" ".join(said.split()))
    if done.returncode != _FOUND:
        raise ConfigError(f"{', '.join(named)}: a process that imports this {describe_exit(done.returncode)}")


def main(script: str, codec: str, pull_codec: str) -> None:
    see_beside(script, is_module=not script)
    try:
        codecs_of(JobConfig(codec=codec, pull_codec=pull_codec), load)
    except ConfigError as error:
        sys.stdout.write(f"\n{_MARK}{error}\n")
        sys.stdout.flush()
        os._exit(_REFUSED)
    os._exit(_FOUND)  # whatever the user's module has started


if __name__ == "__main__":
    main(*sys.argv[1:])
