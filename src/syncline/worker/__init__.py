"""Inside a worker's process: the job as a script sees it. Needs NumPy only.

Layout, in reading order:

job          what `syncline.init()` returns; puts all parts together
current      the current job of this process or thread
kv           `job.kv`: keys and values on the servers
exchange/    how gradients become new parameters
mean_gradients, replicated_steps   steps of optimizers that run on every worker, on the mean gradient of a round
host_memory, host_optimizer, host_state   adapters whose arrays are in host memory: arrays, steps, optimizer state
push_interval   `--sync-every`: how many local steps there are between two pushes
nominal      the weight of a push that counts in full
data/        what a worker reads: leases, loops, samples
steps        a worker's steps: restarts, `job.progress`, `job.steps`
checkpoint/  the state of the script: boundaries, saves, resuming, random states
metrics      `job.report`, and what the job's rules make of it
media        images, histograms and texts of this worker on their way to the coordinator
validation   `job.validate`
collectives/ workers among themselves
stages       the processes of a pipeline, which are one worker of the job
session      with the coordinator: rosters, what it says, what it is asked
reporting    heartbeats, reports, `job.stats()`
waits        what a worker waits for, and where the time of its steps goes
arrays       the caller's arrays as bytes; copies by several threads
"""
