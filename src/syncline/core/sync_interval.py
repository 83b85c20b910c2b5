"""How often a worker exchanges with the servers: `--sync-every H`, `--sync-every auto` and `--pull-every P`.

`SyncInterval` chooses H for one worker from what the worker measures. It is pure: seconds go in, H comes out.
"""

from __future__ import annotations

import statistics

from syncline.config import JobConfig
from syncline.core.policy import parse_policy
from syncline.errors import ConfigError

#: The range of H with `auto`.
LEAST_STEPS, MOST_STEPS = 1, 64
#: H is raised when the exchange takes more than this share of the time.
MOST_SHARE = 0.10
#: It is raised to the smallest H whose predicted share is at most this.
TARGET_SHARE = 0.05
#: It is halved when half of it would still have at most this share.
LOW_SHARE = 0.04
#: Pushes between two decisions.
NUM_PUSHES = 4
#: One decision multiplies H by at most this.
MOST_TIMES = 8
#: A higher H with more than this part of the exchange seconds per step did not help.
NO_GAIN = 0.8
#: After a raise that did not help: decisions until the next one.
PATIENCE = 8


class SyncInterval:
    """The number of local steps between two pushes of one worker.

    With `auto`, every fourth push decides. An exchange takes about the same time whatever H is, and so does a step.
    So the share of H steps is predicted: exchange / (exchange + H · compute). A worker that waits for slower workers
    waits longer with a higher H: if a raise did not lower the seconds per step, it is undone, and not tried again for
    a while.
    """

    def __init__(self, sync_every: int | str) -> None:
        self.is_auto = sync_every == "auto"
        self.steps = LEAST_STEPS if isinstance(sync_every, str) else sync_every  #: H now
        self._compute: list[float] = []  # seconds per step, of each push since the last decision
        self._exchange: list[float] = []  # seconds of each push
        self._before: tuple[int, float] | None = None  # H before the last raise, and exchange seconds per step
        self._patience = 0

    def pushed(self, num_steps: int, compute_seconds: float, exchange_seconds: float) -> None:
        """A push of so many steps is complete: H may change."""
        if not self.is_auto or num_steps < 1:
            return
        self._compute.append(max(0.0, compute_seconds) / num_steps)
        self._exchange.append(max(0.0, exchange_seconds))
        if len(self._exchange) < NUM_PUSHES:
            return
        # The shortest: in the others the worker also waited for slower ones, or for a reconfiguration, and a higher H
        # does not shorten that.
        compute, exchange = statistics.median(self._compute), min(self._exchange)
        self._compute, self._exchange = [], []
        self.steps = self._decide(compute, exchange)

    def _decide(self, compute: float, exchange: float) -> int:
        share, before = share_of(exchange, compute, self.steps), self._before
        self._before, self._patience = None, max(0, self._patience - 1)
        if before is not None and exchange / self.steps > NO_GAIN * before[1]:
            self._patience = PATIENCE
            return before[0]
        if share > MOST_SHARE:
            if self._patience or self.steps >= MOST_STEPS:
                return self.steps
            self._before = (self.steps, exchange / self.steps)
            return self._raised(compute, exchange)
        half = max(LEAST_STEPS, self.steps // 2)
        return half if share_of(exchange, compute, half) <= LOW_SHARE else self.steps

    def _raised(self, compute: float, exchange: float) -> int:
        most = min(MOST_STEPS, self.steps * MOST_TIMES)
        steps = self.steps
        while steps < most and share_of(exchange, compute, steps) > TARGET_SHARE:
            steps = min(most, steps * 2)
        return steps


def share_of(exchange_seconds: float, compute_seconds: float, num_steps: int) -> float:
    """The share of an exchange in the time of so many steps and one exchange."""
    total = exchange_seconds + num_steps * compute_seconds
    return exchange_seconds / total if total > 0 else 0.0


def check_frequencies(config: JobConfig) -> None:
    """Raises ConfigError for frequencies that cannot be, or not together."""
    if config.steps_locally and config.window:
        raise ConfigError(
            f"--sync-every {config.sync_every} and --window {config.window} cannot be combined: local steps go on "
            "from the parameters that answer the last push; leave --window out, or raise --sync-every"
        )
    if config.pull_every == 1:
        return
    if parse_policy(config.policy).in_rounds:
        where = "in a ring" if config.is_ring else f"in {config.policy}"
        raise ConfigError(
            f"--pull-every {config.pull_every} needs --policy bounded:K or async, on servers: {where} all workers "
            "of a round continue from the same new parameters"
        )
    if config.steps_locally:
        raise ConfigError(
            f"--pull-every {config.pull_every} and --sync-every {config.sync_every} cannot be combined: local steps "
            "begin from the parameters that answer the last push; leave one of them out"
        )
