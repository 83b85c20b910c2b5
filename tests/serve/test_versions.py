"""Which version answers: switches, rollbacks, pins and canaries, as a table of moves."""

from __future__ import annotations

import pytest

from syncline.errors import ConfigError
from syncline.serve.versions import Version, Versions


def version(number: int) -> Version:
    return Version(str(number), f"d{number}", f"saves/{number}", number, lambda inputs: {})


def with_versions(*numbers: int, keep: int = 3) -> Versions[Version]:
    versions: Versions[Version] = Versions(keep)
    for number in numbers:
        versions.add(version(number))
    return versions


def test_another_process_stands_in_the_same_way() -> None:
    """Also after a rollback, with a canary: a process that takes over must not bring back what was left."""
    versions = with_versions(1, 2, 3)
    versions.rollback()
    versions.set_canary(0.25)
    versions.add(version(4))
    other: Versions[Version] = Versions()
    other.follow(versions.standing(), {f"d{number}": version(number) for number in (1, 2, 4)})
    assert other.standing() == versions.standing()
    assert names(other) == ["1", "2", "4"] and answering(other) == "2" and not other.is_wanted("d3")
    assert [other.draw().name for _ in range(8)].count("4") == 2  # type: ignore[union-attr]
    assert other.rollback().name == "1"


def names(versions: Versions[Version]) -> list[str]:
    return [one.name for one in versions.loaded()]


def answering(versions: Versions[Version]) -> str:
    found = versions.current
    assert found is not None
    return found.name


def test_a_new_version_takes_over_and_old_ones_are_forgotten() -> None:
    versions = with_versions(1, 2, 3, 4)
    assert answering(versions) == "4" and names(versions) == ["2", "3", "4"]
    assert versions.find("") is versions.current and versions.find("1") is None
    assert not versions.is_wanted("d4") and versions.is_wanted("d5")


def test_a_rollback_stays_until_a_newer_version_comes() -> None:
    """The version that was left must not come back by itself with the next look at the folder."""
    versions = with_versions(1, 2)
    assert versions.rollback().name == "1" and names(versions) == ["1"] and not versions.is_wanted("d2")
    with pytest.raises(ConfigError, match="no earlier version"):
        versions.rollback()
    assert versions.add(version(3)) == "current" and answering(versions) == "3"


def test_a_rollback_may_pin() -> None:
    """A job that is followed gives the next version within seconds. New ones do not drive out those before: there may
    be another rollback.
    """
    versions = with_versions(1, 2, 3)
    assert versions.rollback(pins=True).name == "2" and versions.is_pinned
    assert [versions.add(version(number)) for number in (4, 5, 6)] == ["beside"] * 3
    assert answering(versions) == "2" and names(versions) == ["1", "2", "6"]
    assert versions.rollback(pins=True).name == "1"
    assert versions.unpin().name == "6" and versions.add(version(7)) == "current"


@pytest.mark.parametrize("keep", [2, 5])
def test_as_many_versions_are_kept_as_was_said(keep: int) -> None:
    versions = with_versions(*range(1, 9), keep=keep)
    assert names(versions) == [str(number) for number in range(9 - keep, 9)]
    for _ in range(keep - 1):
        versions.rollback()
    assert answering(versions) == str(9 - keep)
    versions.pin(answering(versions))
    versions.add(version(9))
    versions.add(version(10))
    assert "10" in names(versions) and len(names(versions)) <= keep
    versions.set_canary(0.5)
    versions.add(version(11))
    assert versions.canary is not None and versions.canary.name == "11" and len(names(versions)) <= keep


def test_of_two_versions_of_one_name_the_newest_is_meant() -> None:
    """A folder of checkpoints that is emptied and written again has the same numbers: `find` and `pin` agree."""
    versions = with_versions(1)
    versions.add(Version("1", "other", "saves/1", 1, lambda inputs: {}))
    assert versions.pin("1") is versions.find("1") is versions.loaded()[-1]


def test_a_pinned_version_stays() -> None:
    versions = with_versions(1, 2)
    with pytest.raises(ConfigError, match="version '7' is not in memory; there are 1, 2"):
        versions.pin("7")
    versions.pin("1")
    assert [versions.add(version(number)) for number in (3, 4, 5)] == ["beside"] * 3
    assert answering(versions) == "1" and names(versions) == ["1", "4", "5"]
    assert versions.unpin().name == "5"


def test_a_canary_gets_its_share_exactly() -> None:
    versions = with_versions(1)
    versions.set_canary(0.1)
    assert versions.add(version(2)) == "canary" and answering(versions) == "1"
    drawn = [versions.draw() for _ in range(1000)]
    assert sum(one.name == "2" for one in drawn if one is not None) == 100
    assert versions.set_canary(1.0) is not None and answering(versions) == "2" and versions.share == 0.0


def test_a_canary_that_is_left_does_not_come_back() -> None:
    versions = with_versions(1)
    versions.set_canary(0.5)
    versions.add(version(2))
    versions.set_canary(0.0)
    assert answering(versions) == "1" and names(versions) == ["1"] and not versions.is_wanted("d2")
    assert {one.name for _ in range(10) if (one := versions.draw()) is not None} == {"1"}


def test_a_canary_of_what_was_pinned_away() -> None:
    versions = with_versions(1, 2)
    versions.pin("1")
    canary = versions.set_canary(0.25)
    assert canary is not None and canary.name == "2"
    for share in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="from 0% to 100%"):
            versions.set_canary(share)
