"""Where metrics go besides the run's folder: what `--sink` may name.

Pure. Sinks themselves are in the package `sinks`.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import Final

import msgspec

from syncline.config import JobConfig
from syncline.errors import ConfigError

OFF, TENSORBOARD, MLFLOW = "off", "tensorboard", "mlflow"
_HOST: Final = re.compile(r"[A-Za-z0-9_.-]+(:\d{1,5})?|\[[0-9A-Fa-f:]+\](:\d{1,5})?")


class SinkPlace(msgspec.Struct, frozen=True):
    """A sink that was named."""

    kind: str  #: tensorboard, mlflow
    where: str = ""  #: of mlflow: a tracking server's address or a folder; "": what the client is set to
    experiment: str = ""  #: of mlflow


def places_of(config: JobConfig) -> list[SinkPlace]:
    """The sinks that `--sink` names; `off` stands alone. Raises ConfigError."""
    if OFF in config.sink:
        if len(config.sink) > 1:
            raise ConfigError(f"--sink {OFF} cannot be combined with other sinks")
        return []
    return [_place(text) for text in dict.fromkeys(config.sink)]


def _place(text: str) -> SinkPlace:
    if text == TENSORBOARD:
        return SinkPlace(TENSORBOARD)
    try:
        address = urllib.parse.urlsplit(text)
        experiments = urllib.parse.parse_qs(address.query, strict_parsing=bool(address.query))
    except ValueError as error:
        raise ConfigError(f"--sink {text!r}: {error}") from None
    if "@" in address.netloc:
        raise ConfigError(
            "--sink: an address with a password would be kept with the run; set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD instead"
        )
    unknown = sorted(experiments.keys() - {"experiment"})
    if address.scheme not in (MLFLOW, f"{MLFLOW}+https") or address.fragment or unknown or "://" not in text:
        raise ConfigError(
            f"--sink {text!r}: give {OFF}, {TENSORBOARD}, mlflow://HOST:PORT, mlflow:///FOLDER or mlflow:// for "
            "MLFLOW_TRACKING_URI; ?experiment=NAME names the experiment"
        )
    experiment = experiments.get("experiment", [""])[-1]
    if address.netloc in ("", "."):
        path = urllib.parse.unquote(address.path)
        return SinkPlace(MLFLOW, f".{path}" if address.netloc and path else path, experiment)
    if not _HOST.fullmatch(address.netloc):
        raise ConfigError(f"--sink {text!r}: {address.netloc!r} is no HOST:PORT")
    scheme = "https" if address.scheme.endswith("+https") else "http"
    return SinkPlace(MLFLOW, f"{scheme}://{address.netloc}{address.path.rstrip('/')}", experiment)
