"""Votes of a ring: what counts, and what is left of it when replica sets change."""

from __future__ import annotations

from syncline.core.ring import Ballot, Votes, ballot_of, settled_by

FIRST, SECOND = Ballot(3, "worker-0", 1, 7), Ballot(3, "worker-0", 1, 8)
ALL = ("server-0", "server-1", "server-2")


def begun() -> Votes:
    votes = Votes()
    votes.begin(3, ALL)
    return votes


def test_a_round_counts_when_all_have_voted_for_it() -> None:
    votes = begun()
    for server in ALL:
        assert not votes.is_decided(FIRST)
        votes.vote(FIRST, server)
        votes.vote(FIRST, server)  # said again
    assert votes.is_decided(FIRST) and not votes.is_decided(SECOND)


def test_it_is_known_whose_votes_are_missing() -> None:
    votes = begun()
    votes.vote(FIRST, "server-1")
    votes.vote(FIRST, "server-9")  # who is none of them counts nothing
    assert votes.missing(FIRST) == ["server-0", "server-2"]


def test_a_round_has_one_ballot_whoever_sees_it() -> None:
    commits = [("worker-1", 2, 5), ("worker-0", 1, 7)]
    assert ballot_of(3, commits) == ballot_of(3, reversed(commits)) == FIRST


def test_of_an_older_generation_no_vote_counts_and_of_a_later_one_it_is_kept() -> None:
    """The same round may be made again, with others in it: what was voted on before is another."""
    votes, repeated = begun(), Ballot(5, "worker-0", 1, 7)
    votes.vote(FIRST, "server-0")
    votes.vote(repeated, "server-1")  # it has heard of the change before us
    assert not votes.is_decided(repeated)
    votes.begin(5, ("server-0", "server-1"))
    for server in ALL:
        votes.vote(FIRST, server)
    assert not votes.is_decided(FIRST)
    votes.vote(repeated, "server-0")
    assert votes.is_decided(repeated)


def test_what_every_survivor_holds_counts_and_nothing_else() -> None:
    a, b = ("worker-0", 1), ("worker-1", 2)
    assert settled_by([{a: 7, b: 5}, {a: 6, b: 5}, {a: 7, b: 4}]) == {a: 6, b: 4}
    assert settled_by([{a: 7}, {}]) == {a: 0}, "one of them has nothing of it"
    assert settled_by([]) == {}
