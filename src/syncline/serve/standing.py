"""What `serve-ctl` changes of the versions, and what it is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from syncline.errors import ConfigError
from syncline.serve.control import ControlRequest
from syncline.serve.metrics import ServingTotals
from syncline.serve.reading import VersionSource
from syncline.serve.versions import Versions

log = logging.getLogger("syncline.serve")


def change(versions: Versions[Any], request: ControlRequest, *, is_followed: bool) -> None:
    """Does what was asked for. ConfigError: it cannot be. `is_followed`: versions come from a job, every few seconds,
    so a rollback that ended with the next one would be none.
    """
    match request.verb:
        case "rollback":
            name = versions.rollback(pins=is_followed).name
            log.info("rolled back to version %s%s", name, ", which is pinned" if is_followed else "")
        case "pin":
            log.info("pinned to version %s", versions.pin(request.version).name)
        case "unpin":
            log.info("unpinned; version %s answers", versions.unpin().name)
        case "canary":
            canary = versions.set_canary(request.share)
            log.info("canary: %.3g%% to %s", 100 * request.share, canary.name if canary else "the next version")
        case _:
            raise ConfigError(f"there is no verb {request.verb!r}")


def told(
    versions: Versions[Any],
    totals: ServingTotals,
    name: str,
    url: str,
    source: VersionSource | None,
    processes: Sequence[Any] = (),
) -> dict[str, Any]:
    """How the versions stand, for serve-ctl. `processes`: those of several replicas."""
    current, canary, latency = versions.current, versions.canary, totals.latency
    return {
        "name": name,
        "url": url,
        "current": current.name if current is not None else "",
        "canary": canary.name if canary is not None else "",
        "share": versions.share,
        "is_pinned": versions.is_pinned,
        "versions": [{"name": one.name, "step": one.step, "where": one.where} for one in versions.loaded()],
        "num_requests": totals.num_requests,
        "p50_seconds": latency.quantile(0.5),
        "p99_seconds": latency.quantile(0.99),
        "trouble": source.trouble if source is not None else "",
        "processes": [msgspec.to_builtins(one) for one in processes],
    }
