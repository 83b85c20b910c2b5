"""The versions of Keras and its backends that this package needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

from syncline.errors import ConfigError

#: By package. The tests have passed with this Keras, this JAX and this TensorFlow, each beside newer ones of the
#: others, but not yet with this torch.
LOWEST = {"keras": "3.10.0", "tensorflow": "2.17.0", "jax": "0.5.1", "torch": "2.4.0"}
BACKENDS = ("tensorflow", "jax", "torch")
#: The usual distributions of the package `tensorflow`.
_DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tf-nightly")}


def check_versions(*packages: str) -> None:
    """Names what is too old, or missing, before an import fails with less to say."""
    for package in packages or ("keras",):
        found = installed(package)
        if not found:
            raise ConfigError(
                f"{package} is not installed here; install it: pip install '{package}>={LOWEST[package]}'"
            )
        if _numbers(found) < _numbers(LOWEST[package]):
            raise ConfigError(
                f"{package} {found} is too old: {LOWEST[package]} or newer is needed; update it: "
                f"pip install --upgrade '{package}>={LOWEST[package]}'"
            )


def import_keras() -> None:
    """Keras imports its backend: where that fails, says why and what to do."""
    try:
        importlib.import_module("keras")
    except Exception as error:  # an old backend may fail in any way
        named = str(getattr(error, "name", None) or "").partition(".")[0]
        suspects = [named] if named in BACKENDS else [name for name in BACKENDS if installed(name)]
        reason = f"{type(error).__name__}: {error}"
        try:
            check_versions(*suspects)
        except ConfigError as found:
            reason = str(found)
        raise ConfigError(
            f"Keras cannot import its backend: {reason}. To use another one, set KERAS_BACKEND to one of "
            f"{', '.join(BACKENDS)} before the start"
        ) from error


def installed(package: str) -> str:
    """The version of an installed package; empty: it is not there."""
    for name in _DISTRIBUTIONS.get(package, (package,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec(package) is None:
        return ""
    # A distribution of another name, for example keras-nightly or tensorflow-rocm.
    return str(getattr(importlib.import_module(package), "__version__", ""))


def _numbers(version: str) -> tuple[int, ...]:
    """3.15.1 as numbers; what follows them (rc1, +cpu) is left out."""
    found = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: next((place for place, letter in enumerate(part) if not letter.isdigit()), len(part))]
        found.append(int(digits or 0))
    return tuple(found)
