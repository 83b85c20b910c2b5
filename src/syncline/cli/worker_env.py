"""`syncline worker-env`: runs a command as one rank of mpirun, torchrun or srun, with settings for its job."""

from __future__ import annotations

import os
import pathlib
from typing import Annotated, Any

import msgspec
import typer

from syncline import config as configuration
from syncline.cli.options import settings_of, takes_job_options
from syncline.errors import ConfigError
from syncline.launch.rendezvous import read_token
from syncline.launch.start import own_world


@takes_job_options
def worker_env(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="What this rank runs, e.g. python train.py.")
    ] = None,
    **said: Any,
) -> None:
    """Runs a command as one rank of mpirun, torchrun or srun, with settings for the job.

    The options are those of `syncline run`; the number of workers is that of the ranks. The script's init() joins the
    job, and rank 0 starts the coordinator and the servers. Without options, plain `mpirun -n 8 python train.py` does
    the same.

    Example:  mpirun -n 8 syncline worker-env -s 2 --checkpoint saves python train.py
    """
    if not command:
        raise ConfigError("no command was given, e.g. mpirun -n 8 syncline worker-env python train.py")
    if own_world() is None:
        raise ConfigError(
            "mpirun, torchrun or srun has not started this process as one of several; give it to one of them: "
            f"mpirun -n 2 syncline worker-env {' '.join(command)}"
        )
    if path := configuration.token_file():
        read_token(pathlib.Path(path))
    settings = configuration.check_known(settings_of(said), "syncline worker-env")
    extra = {configuration.SETTINGS: msgspec.json.encode(settings).decode()} if settings else {}
    try:
        os.execvpe(command[0], command, configuration.inherited_environment(extra))
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror or error}") from None
