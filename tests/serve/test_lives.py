"""When processes start again and when silent ones are killed: tables with a clock of their own."""

from __future__ import annotations

from syncline.serve.replicas.lives import ProcessLives


def with_one(silence_seconds: float = 10.0) -> ProcessLives[str]:
    lives: ProcessLives[str] = ProcessLives()
    lives.add("a", silence_seconds)
    return lives


def test_what_was_up_starts_again_at_once() -> None:
    lives = with_one()
    assert lives.due(0.0).start == ("a",)
    lives.started("a", 0.0)
    lives.up("a", 1.0)
    assert lives.due(2.0).start == () and lives.is_up("a") and lives.num_restarts("a") == 0
    assert lives.ended("a", 3.0) == 0.0
    assert not lives.is_up("a") and lives.due(3.0).start == ("a",)
    lives.started("a", 3.0)
    assert lives.num_restarts("a") == 1


def test_what_dies_at_its_start_waits_longer_and_longer() -> None:
    lives, now, pauses = with_one(), 0.0, []
    for _ in range(10):
        lives.started("a", now)
        pauses.append(lives.ended("a", now))
        assert lives.due(now + 0.9 * pauses[-1]).start == ()
        now += pauses[-1]
        assert lives.due(now).start == ("a",)
    assert pauses[:3] == [0.1, 0.2, 0.4] and pauses[-1] == 10.0
    lives.started("a", now)
    lives.up("a", now)
    assert lives.ended("a", now) == 0.0  # it had worked


def test_a_silent_process_is_killed() -> None:
    lives = with_one(10.0)
    lives.started("a", 0.0)
    assert lives.due(100.0).kill == ()  # it imports
    lives.up("a", 100.0)
    lives.heard("a", 105.0)
    assert lives.due(115.0).kill == ()
    ((key, reason),) = lives.due(115.1).kill
    assert key == "a" and reason == "it has said nothing for 10.1 s"
    lives.started("a", 116.0)
    assert len(lives.due(237.0).kill) == 1  # a start has a limit too


def test_time_in_which_the_keeper_itself_was_stopped_does_not_count() -> None:
    lives = with_one(10.0)
    lives.started("a", 0.0)
    lives.up("a", 0.0)
    lives.skipped(60.0)
    assert lives.due(65.0).kill == () and len(lives.due(71.0).kill) == 1
