"""Planted bugs: switches of the simulator only, each of which the invariants must catch.

With each stands a seed that catches it today: `make test` looks at that one and its neighbours, `make proof` begins
at 0.
"""

from __future__ import annotations

BUGS: dict[str, tuple[str, int]] = {
    "skip_fence": ("an evicted worker is let out of the rounds, and its commits still count", 547),
    "early_ack": ("the primary applies and answers before its backup has the update", 8),
    "clocks_apart": ("a seed brings parameters without their clocks", 3),
    "reuse_incarnation": ("a process that comes back gets the number that its name had before", 5),
    "release_early": ("rounds and places are given to others before every server has the fence", 0),
    "promote_unkept": ("a promotion is carried out without being in the journal", 367),
    "no_settle": ("a fenced worker's step that one server has committed is not settled on the others", 8),
    "commit_early": ("a step is committed on one server before all have it staged", 94),
    "no_generation": ("generations are told before they are in the journal", 367),
    "accept_old_term": ("the word of a coordinator that was replaced counts, and its writes too", 12),
    "accept_stale_generation": ("servers take commits of a generation that is over", 34),
    "alone_without_word": ("a primary whose backup is gone goes on alone without the coordinator's word", 122),
    "redo_new_clock": ("an open step is made anew under a new clock", 0),
    "forget_open": ("a commit that is repeated while its round is open counts twice", 3),
    "enter_one_server": ("those who enter begin with the round that one server has opened, not any", 42),
    "no_tail": ("a new backup gets a copy, and not the updates that follow", 4),
    "copy_without_clocks": ("a slice comes back from a copy without its clocks", 22),
    "copy_by_name": ("a copy's clocks do not say of which incarnation they are", 170),
    "accept_stale_replica": ("a backup takes updates of a primary that was replaced", 65),
    "settle_fenced_only": (
        "where primaries change only the fenced are settled: rounds come out differently, dying workers are torn",
        8,
    ),
    "forget_standings": ("with the last server that knew them, workers are forgotten that live", 7),
    "install_late": ("a server installs a generation although its hold has ended by itself", 851),
    "old_era": ("those who enter behind a barrier are put into the era before it", 1920),
    "no_second_entry": (
        "who came late to a barrier, or has paused, goes on in the rounds as if it had been there",
        136,
    ),
    "back_before_fence": ("leases of the evicted go to others before its fence is settled", 17),
    "done_by_word": ("what workers say they have committed counts as done", 1),
    "uses_unreplicated": ("what was used is not on the backup of slice 0", 6),
    "uses_unseeded": ("slice 0 goes to another server without what was used", 7),
    "reuse_lease": ("a coordinator that comes back gives numbers of leases that are through once more", 210),
    "confirm_unkept": ("servers may forget what was used before the coordinator has kept it", 7),
    "lease_unkept": ("leases are told before they are in the journal", 12),
    "late_counts": ("what was in a late commit counts as used", 1),
    "open_is_done": ("what the dead have committed counts as done before it is applied", 895),
    "back_while_open": ("leases of the dead go back while a commit of theirs waits for its round", 66),
    "roll_unreplicated": ("a backup gets a round without hearing who is in it", 1_000_823),
    "rolls_untold": ("servers are not told of rounds that others know to be closed", 1_000_014),
    "any_order": ("a round is closed before anybody of the last one has gone on", 1_000_002),
    "keep_undecided": (
        "what a dead worker has committed counts in a round that is closed after it",
        1_000_097,
    ),
    "word_of_before": ("what a worker says of leases counts also over a connection that was replaced", 1_000_039),
    "confirmed_is_lost": ("with what was used and not confirmed, what was confirmed is forgotten too", 47),
    "given_once": ("what a worker has given back it says once, whether or not that was kept", 71),
}
