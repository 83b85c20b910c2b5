"""Inside a worker's process: the job as a script sees it. Needs NumPy only.

Layout, in reading order:

job          what `syncline.init()` returns; puts all parts together
current      the current job of this process or thread
kv           `job.kv`: keys and values on the servers
exchange/    how gradients become new parameters
data/        what a worker reads: leases, loops, samples
steps        a worker's steps: restarts, `job.progress`, `job.steps`
checkpoint/  the state of the script: boundaries, saves, resuming, random states
metrics      `job.report`, and what the job's rules make of it
validation   `job.validate`
collectives/ workers among themselves
session      with the coordinator: rosters, what it says, what it is asked
reporting    heartbeats, reports, `job.stats()`
waits        what a worker waits for, and where the time of its steps goes
arrays       the caller's arrays as bytes; copies by several threads
"""
