"""How a model is served: the settings of `syncline serve` and of `syncline.serve.Server`."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from syncline.errors import ConfigError
from syncline.serve.devices import check_device


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is served."""

    name: str = ""  #: of the model, in paths; default: that of the class or function
    host: str = "127.0.0.1"
    port: int = 8000  #: 0: any free one
    grpc_port: int = -1  #: -1: no gRPC; 0: any free one
    pick: str = "best"  #: of a folder of checkpoints: `best` (the newest if there is none) or `last`
    inputs: tuple[str, ...] = ()  #: `NAME:DATATYPE:SHAPE` of one row each; default: those of `example`
    max_batch: int = 32  #: rows of one call of the model
    max_delay: float = 0.005  #: seconds that a request may wait for others while the server is busy
    max_queue: int = 1024  #: requests that may wait
    call_seconds: float = 120.0  #: for one call of the model; then requests get errors; 0.0: any
    trial_seconds: float = 600.0  #: to load a new version, and for its trial; then it is refused; 0.0: any
    keep: int = 3  #: versions in memory, for a rollback
    max_body: int = 64 << 20  #: bytes of one request
    max_connections: int = 1024
    head_seconds: float = 5.0  #: for the head of a request to arrive
    body_seconds: float = 30.0  #: for its body
    idle_seconds: float = 75.0  #: that a connection may stay open between two requests
    rate: str = ""  #: requests of one address, e.g. `100/s`; default: any number
    token_file: str = ""  #: default: none on loopback, else a new one in the folder of this name
    cert: str = ""  #: a PEM file; with `key`: HTTPS
    key: str = ""
    refresh: float = 2.0  #: seconds between two looks for a new version; 0.0: none
    guard: str = ""  #: a condition on what the file's `validate` returns, e.g. `accuracy>=0.85`
    device: str = ""  #: of torch models: `cpu`, `cuda`, `cuda:N` or `auto`; default: where the module is made
    threads: int = 0  #: for the model's kernels, of all replicas together; default: one per core
    replicas: int = 1  #: processes that answer behind the port; 1: the server's own process
    silence_seconds: float = 10.0  #: after which a replica that says nothing is killed, and starts again
    drain_seconds: float = 4.0  #: for open requests at the end
    runs: str = "runs"  #: the folder under which the socket of `serve-ctl` and the token are


LEAST: dict[str, float] = {
    "port": 0,
    "grpc_port": -1,
    "max_batch": 1,
    "max_delay": 0.0,
    "max_queue": 1,
    "call_seconds": 0.0,
    "trial_seconds": 0.0,
    "keep": 2,
    "max_body": 1024,
    "max_connections": 1,
    "head_seconds": 0.01,
    "body_seconds": 0.01,
    "idle_seconds": 0.01,
    "refresh": 0.0,
    "replicas": 1,
    "silence_seconds": 1.0,
    "threads": 0,
    "drain_seconds": 0.0,
}
_MOST = {
    "port": 65535,
    "grpc_port": 65535,
    "max_batch": 1 << 20,
    "max_body": 1 << 34,
    "keep": 1024,
    "threads": 4096,
    "replicas": 256,
}


def resolved(config: ServeConfig, settings: dict[str, Any]) -> ServeConfig:
    """The configuration with these settings; ConfigError for what cannot be."""
    if unknown := settings.keys() - set(ServeConfig.__struct_fields__):
        raise ConfigError(f"unknown setting {min(unknown)!r}; there are {', '.join(ServeConfig.__struct_fields__)}")
    given = {key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in settings.items()}
    config = msgspec.structs.replace(config, **given)
    try:
        config = msgspec.convert(msgspec.to_builtins(config), ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings of serving: {error}") from None
    for name, least in LEAST.items():
        value = getattr(config, name)
        if not least <= value <= _MOST.get(name, 1 << 40):
            raise ConfigError(f"{name} = {value}: must be from {least:g} to {_MOST.get(name, 1 << 40)}")
    check_device(config.device)
    return config
