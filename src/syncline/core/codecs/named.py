"""The codecs of a job, by its settings."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable

from syncline.config import JobConfig
from syncline.core.codecs.codec import Codec
from syncline.core.codecs.halves import Bf16, Fp16
from syncline.core.codecs.int8 import Int8
from syncline.core.codecs.topk import TopK
from syncline.core.layout import Parameter, Segment
from syncline.errors import ConfigError
from syncline.extensions import is_named

_PLAIN: dict[str, Codec] = {codec.name: codec for codec in (Bf16(), Fp16(), Int8())}
_SHARE = re.compile(r"topk:(\d{0,3}\.?\d{1,12}(?:e-?\d{1,2})?)", re.ASCII)
#: Names for no codec.
NONE = ("", "none")

Load = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Codecs:
    """A job's codecs for pushes and pulls; `exempt`: parameters that are never encoded."""

    push: Codec | None = None
    pull: Codec | None = None
    exempt: tuple[str, ...] = ()

    def encodes(self, segment: Segment, parameter: Parameter) -> bool:
        """Whether a parameter is encoded: float32 only, and never with `Assign`, as for masks or counts."""
        if parameter.dtype != "float32" or segment.rule_of(parameter).name == "Assign":
            return False
        return not any(fnmatch.fnmatchcase(parameter.name, pattern) for pattern in self.exempt)


def codecs_of(config: JobConfig, load: Load | None = None) -> Codecs:
    """The validated codecs of a job. Without `load`, user-defined codecs count as none."""
    push = parse_codec("--codec", config.codec, load)
    pull = parse_codec("--pull-codec", config.pull_codec, load)
    if isinstance(pull, TopK):
        raise ConfigError(
            f"--pull-codec {config.pull_codec}: a pull needs every parameter; choose from "
            f"{', '.join(_PLAIN)}, or package.module:name"
        )
    exempt = tuple(name.strip() for name in config.codec_exempt.split(",") if name.strip())
    if exempt and config.codec in NONE and config.pull_codec in NONE:
        raise ConfigError(f"--codec-exempt {config.codec_exempt!r} needs --codec or --pull-codec")
    return Codecs(push, pull, exempt)


def parse_codec(setting: str, text: str, load: Load | None) -> Codec | None:
    """Finds a codec by name; a ConfigError lists the known ones."""
    if text in NONE:
        return None
    if text in _PLAIN:
        return _PLAIN[text]
    if text.partition(":")[0] == "topk":
        found = _SHARE.fullmatch(text)
        share = float(found.group(1)) if found is not None else 0.0
        if not 0 < share < 1:
            raise ConfigError(f"{setting} {_short(text)}: topk:R is a share of the numbers, e.g. topk:0.01")
        return TopK(share)
    if not is_named(text):
        raise ConfigError(
            f"{setting} {_short(text)}: must be one of {', '.join(_PLAIN)}, topk:R (e.g. topk:0.01), none, or one of "
            "your own as package.module:name"
        )
    if load is None:
        return None
    try:
        found_own = load(text)
    except ConfigError as error:
        raise ConfigError(f"{setting} {error}") from error
    return _checked(setting, text, found_own)


def _checked(setting: str, text: str, found: object) -> Codec:
    for name in ("bound", "encode", "decode"):
        if not callable(getattr(found, name, None)):
            raise ConfigError(f"{setting} {text}: {type(found).__name__} has no {name}(); see syncline.Codec")
    if not isinstance(getattr(found, "name", None), str) or not found.name:  # type: ignore[attr-defined]
        raise ConfigError(f"{setting} {text}: {type(found).__name__} has no name; see syncline.Codec")
    if not isinstance(getattr(found, "is_lossy", None), bool):
        raise ConfigError(f"{setting} {text}: {type(found).__name__} does not say is_lossy; see syncline.Codec")
    return found  # type: ignore[return-value]


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")
