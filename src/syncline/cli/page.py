"""`syncline page`: a link to a running job's page, or the page of the runs that have ended."""

from __future__ import annotations

import importlib.util
import secrets
import sys
from typing import Annotated

import typer

from syncline.cli.status import RunsOption, find, runs_folder
from syncline.core.wire.control import AskPage, GivenPage
from syncline.errors import ConfigError
from syncline.launch.watching import ask
from syncline.page import serving
from syncline.page.access import Access
from syncline.page.hosts import page_hosts_of


def page(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Name of a job under runs/, or its job file.")
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="[ADDRESS:]PORT",
            help="Without JOB: where. [default: a free port of loopback]",
            show_default=False,
        ),
    ] = "auto",
    page_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Without JOB: a name by which browsers ask for the page through a proxy."),
    ] = None,
    runs: RunsOption = None,
) -> None:
    """Prints a link to a job's web page; without JOB, serves the runs that have ended.

    The link works once, for fifteen minutes; the browser keeps a cookie then. A person with the link can read the
    pages of this job and of the other runs in the folder, and change nothing. Without JOB it serves until Ctrl-C.

    Example:  syncline page train-20250101-120000
    """
    if job is not None:
        link = ask(find(job, runs), AskPage(), GivenPage).link
        if not link:
            raise ConfigError(
                f"the job {job} has no page: it runs with --page off, or without the extra syncline[page]"
            )
        sys.stdout.write(link + "\n")
        return
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client")):
        raise ConfigError("the page needs the extra: pip install 'syncline[page]'")
    folder = runs_folder(runs)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}/ with runs; --runs DIR names another one")
    hosts = page_hosts_of(page_host or ())
    access = Access(secrets.token_hex(8), secrets.token_bytes(32))
    server = serving.PageServer(serving.listen(at, "--at"), access, folder, "", None, hosts)
    sys.stdout.write(f"{server.new_link()}\nthe runs in {folder}/, until Ctrl-C\n")
    sys.stdout.flush()
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
