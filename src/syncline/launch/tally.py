"""What the launcher records during a job, for the table at its end. Pure: `now` is an argument."""

from __future__ import annotations

import dataclasses

from syncline.core.wire.control import Standings
from syncline.launch.summary import Death, Facts


@dataclasses.dataclass
class _Open:
    """A death whose member has not rejoined."""

    index: int  # in the list of deaths
    at: float
    is_begun: bool = False  # its next process was started


class Tally:
    """Records the coordinator's answers and the launcher's observations. A dead coordinator's numbers are lost, so
    the last known ones are kept here.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._last: Standings | None = None
        self._start_seconds: float | None = None
        self._num_steps = 0
        self._readings: dict[str, float] = {}
        self._incarnations: dict[str, int] = {}  # the last known of each member
        self._samples: dict[tuple[str, int], int] = {}  # by life
        self._sample_seconds = 0.0  # the longest of any life
        self._reading: tuple[float, float] | None = None  # time of the first samples and of the last
        self._deaths: list[Death] = []
        self._open: dict[str, _Open] = {}

    def see(self, standings: Standings, now: float) -> None:
        """Takes the job's standings."""
        self._see_who_is_back(standings, now)
        self._last = standings
        if standings.formed and self._start_seconds is None:
            self._start_seconds = max(0.0, now - standings.seconds - self._began)
        step = max([standings.step, *(report.job_step for report in standings.reports.values())])
        self._num_steps = step or self._num_steps  # a restarted coordinator knows none yet
        self._readings |= standings.readings
        before = sum(self._samples.values())
        for name, report in standings.reports.items():
            life = (name, self._incarnations.get(name, 0))
            self._samples[life] = max(report.samples, self._samples.get(life, 0))
            self._sample_seconds = max(self._sample_seconds, report.seconds)
        if sum(self._samples.values()) > before:
            self._reading = (self._reading[0] if self._reading is not None else now, now)

    def _see_who_is_back(self, standings: Standings, now: float) -> None:
        for name, incarnation in standings.incarnations.items():
            if incarnation > self._incarnations.get(name, 0):
                self._incarnations[name] = incarnation
                self._is_back(name, now)
        for name in standings.left:
            self._is_back(name, now)  # it came and went between two looks
        coordinator = self._open.get("coordinator")
        if coordinator is not None and standings.seconds <= now - coordinator.at:
            self._is_back("coordinator", now)  # an answer of the dead one counts from the job's start

    def _is_back(self, name: str, now: float) -> None:
        found = self._open.get(name)
        if found is not None and found.is_begun:
            del self._open[name]
            death = self._deaths[found.index]
            self._deaths[found.index] = dataclasses.replace(death, back_seconds=now - found.at)

    def died(self, name: str, reason: str, now: float, *, comes_back: bool) -> None:
        """A member's process has ended, and the job continues. `comes_back`: it is restarted."""
        if (before := self._open.pop(name, None)) is not None:
            self._deaths[before.index] = dataclasses.replace(self._deaths[before.index], died_again=True)
        self._deaths.append(Death(name, reason, self._num_steps, comes_back))
        if comes_back:
            self._open[name] = _Open(len(self._deaths) - 1, now)

    def starts_again(self, name: str) -> None:
        """Its next process starts; until now the coordinator may have listed the dead one."""
        if name in self._open:
            self._open[name].is_begun = True

    def facts(self, verdict: str, logs: str, now: float, culprit: str = "") -> Facts:
        """All facts at the end. The death of the `culprit` that ended the job is in the outcome."""
        last, seconds = self._last, self._sample_seconds
        ended_by = self._open[culprit].index if culprit in self._open else None
        deaths = tuple(death for number, death in enumerate(self._deaths) if number != ended_by)
        if self._deaths and self._reading is not None:
            seconds = max(seconds, self._reading[1] - self._reading[0])  # no life has read all the time
        found = Facts(
            verdict=verdict,
            seconds=now - self._began,
            logs=logs,
            start_seconds=self._start_seconds,
            num_steps=self._num_steps,
            num_samples=sum(self._samples.values()),
            sample_seconds=seconds,
            deaths=deaths,
        )
        if last is None:
            return found
        return dataclasses.replace(
            found,
            is_known=True,
            is_final=bool(last.verdict) and not last.culprit,
            missing=tuple(last.missing) if not last.formed else (),
            policy=last.policy,
            readings=self._readings,
            best=last.best,
            stop=last.stop,
            num_revoked=last.num_revoked,
            saves=last.saves.told(),
            pushed=last.pushed_told if not self._deaths else "",  # the bytes of dead workers are unknown
        )
