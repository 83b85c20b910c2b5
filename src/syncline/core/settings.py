"""Settings that are small languages of their own: all of them read once, where a job begins."""

from __future__ import annotations

from syncline.config import JobConfig
from syncline.core.codecs.named import codecs_of
from syncline.core.policy import policy_of
from syncline.core.ring import check_ring
from syncline.core.rule import outer_of
from syncline.core.sinks import places_of
from syncline.core.stages import check_stages
from syncline.core.stopping import rules_of
from syncline.core.sync_interval import check_frequencies


def check_settings(config: JobConfig) -> None:
    """Raises ConfigError for what cannot be, or not together."""
    check_ring(config)
    check_stages(config)
    policy_of(config)
    check_frequencies(config)
    rules_of(config)
    outer_of(config)
    codecs_of(config)
    places_of(config)
