"""Why: one sentence that names the cause, in the words of who asks."""

from __future__ import annotations

from syncline.core.liveness import Known, causes, why
from syncline.stats import Wait

KNOWN = {
    "worker-2": Known(host="b", heard_seconds=3.0, left_seconds=0.9),
    "server-0": Known(host="a", heard_seconds=0.1, left_seconds=2.0),
    "server-1": Known(host="a", heard_seconds=0.1, left_seconds=2.0),
}
ROUND = Wait("", 12, ["worker-2"], 3.1, "round")


def test_the_sentence() -> None:
    said = why([ROUND], KNOWN, who="worker-0", step=812)
    assert said == "step 812 has waited 3.1 s for worker-2 on host b (last heard of 3.0 s ago; evicted in 0.9 s)"


def test_who_waits_for_a_server_that_waits_for_a_worker_hears_of_the_worker() -> None:
    told = {
        "worker-0": [Wait("worker-0", 812, ["server-0", "server-1"], 3.3, "server")],
        "worker-1": [Wait("worker-1", 7, ["server-0"], 3.4, "server")],
        "server-0": [ROUND],
        "server-1": [ROUND, Wait("", 0, ["server-0"], 3.2, "server")],  # its backup, which has other work to wait for
    }
    found = causes(told)
    assert {wait.what for wait in found} == {"round"}
    for who, step in (("worker-0", 812), ("worker-1", 7)):
        assert why(found, KNOWN, who=who, step=step).startswith(f"step {step} has waited 3.1 s for worker-2")


def test_a_server_that_waits_for_nobody_is_named() -> None:
    told = {"worker-0": [Wait("worker-0", 812, ["server-0", "server-1"], 3.3, "server")], "server-0": [ROUND]}
    assert causes(told)[0] == Wait("worker-0", 812, ["server-1"], 3.3, "server")


def test_two_servers_that_wait_for_each_other_are_both_named() -> None:
    told = {
        "server-0": [Wait("", 0, ["server-1"], 3.0, "server")],
        "server-1": [Wait("", 0, ["server-0"], 2.0, "server")],
        "worker-0": [Wait("worker-0", 5, ["server-0"], 3.3, "server")],
    }
    assert [wait.for_whom for wait in causes(told)] == [["server-1"], ["server-0"]]
    assert why(causes(told), KNOWN).startswith("a step has waited 3.0 s for server-1")


def test_who_waits_at_another_server_is_not_the_one_that_is_waited_for() -> None:
    """With spare workers worker-3, which was late, is a round ahead of the others at the server that decides. There
    worker-0 and worker-2 are missing; but worker-0 waits at the other server, for worker-2, as everybody does."""
    told = {
        "server-0": [Wait("", 13, ["worker-0", "worker-2"], 3.4, "round")],
        "server-1": [ROUND],
        "worker-0": [Wait("worker-0", 12, ["server-1"], 3.2, "server")],
        "worker-3": [Wait("worker-3", 13, ["server-0"], 3.3, "server")],
    }
    assert [wait.for_whom for wait in causes(told)] == [["worker-2"], ["worker-2"]]
    assert why(causes(told), KNOWN).startswith("step 13 has waited 3.4 s for worker-2 on host b")


def test_who_waits_at_the_server_that_waits_for_it_is_named() -> None:
    told = {"server-0": [ROUND], "worker-2": [Wait("worker-2", 12, ["server-0"], 3.0, "server")]}
    assert ROUND in causes(told)


def test_of_a_circle_all_are_named() -> None:
    told = {
        "server-0": [Wait("", 12, ["worker-0"], 3.0, "round")],
        "server-1": [Wait("", 12, ["worker-1"], 3.0, "round")],
        "worker-0": [Wait("worker-0", 12, ["server-1"], 2.0, "server")],
        "worker-1": [Wait("worker-1", 12, ["server-0"], 2.0, "server")],
    }
    assert [wait.for_whom for wait in causes(told)] == [["worker-0"], ["worker-1"]]


def test_a_worker_hears_of_its_own_wait_and_all_hear_of_the_longest() -> None:
    waits = [Wait("worker-1", 3, ["worker-2"], 9.0, "lag"), Wait("worker-0", 812, ["server-1"], 3.0, "server")]
    assert why(waits, KNOWN, who="worker-0", step=812).startswith("step 812 has waited 3.0 s for server-1")
    assert why(waits, KNOWN).startswith("step 3 of worker-1 has waited 9.0 s for worker-2")
    assert why([ROUND], KNOWN, who="worker-2", step=5) == "no member waits for another"  # they wait for it


def test_a_sentence_has_one_count_of_steps() -> None:
    """worker-2 is alive and has made 471 commits in its process, others that were restarted have made 85."""
    known = {"worker-2": Known(host="b", heard_seconds=0.1, left_seconds=2.0)}
    said = why([Wait("", 472, ["worker-2"], 3.1, "round")], known)
    assert said == (
        "step 472 has waited 3.1 s for worker-2 on host b (last heard of 0.1 s ago; evicted in 597 s if it does not "
        "advance)"
    )
