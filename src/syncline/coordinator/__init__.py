"""The coordinator of a job: its members, where slices are, how the job continues and ends."""

# Layout, in reading order. A file knows only files above it, except service.py, which builds and connects all parts.
#
# job.py                shared state: lock, journal, connections, heartbeats, events; calls to several servers
# leases.py             hands out samples, counts what was used, reassigns what dead workers left
# metrics.py            merges reported metrics into readings; stop rules
# validation.py         validations of all workers together; the checkpoint with the best reading
# restore.py            the checkpoint that a job resumes from; slices that no server has any more
# registration.py       parameters become the layout, are hosted, get values and backups
# checkpoint_writer.py  what happens after a snapshot: files, manifest, old checkpoints, mirror
# cuts.py               all parameters at one point between commits, for followers
# saves.py              when a save is due; its snapshot, retries and answers
# rendezvous.py         the roster of a generation, earlier lives of a worker, barriers
# reconfigure.py        the thread that takes the job from one generation to the next, and moves slices
# scaling.py            how many members there are, and workers that are slowed or paused by hand
# members.py            joining, the start of the job, coming back, leaving, eviction
# status.py             heartbeats, reports, job stats, status, who waits for whom, the profile
# recording.py          looks at the job once a second, and writes down what it sees
# tracing.py            with --trace: writes down what members trace, and tells them the time
# ending.py             JobWatch finds dead, stuck and unreachable members; JobEnding tells all members the outcome
# service.py            Coordinator: builds the parts, passes messages to them, closes them
#
# A death comes in through members.py (a report or a closed connection) or ending.py (silence), and always ends in
# `MemberService.evict`. From there on it is the work of reconfigure.py.
