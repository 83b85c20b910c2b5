"""A server: hosts slices of the parameters, orders and applies commits, keeps backups.

service           the service: which message goes to which part
hosting           the segments, slices and backups that are here
storage           where slices live: blocks of shared memory, or a GPU (device_storage)
slices, rules     one slice: its bytes, state and lock; the rules of its pieces
numbers           what rules work on: tensors of torch, or NumPy arrays where there is none
torch_rules       rules by torch (keras_optimizers: those of Keras); numpy_rules: by NumPy; averages: of parameters
staging           the bytes that workers have sent, until their round is applied
aggregation       gradients of a round become one otherwise than by a mean
gather            `async:gather=N`: a slice applies the mean of every N pushes
commits           a worker's commit: admitted (admission_queue), decided by the core, clipped (clipping)
tasks, executor   a decided round on its way through all slices, in the threads of the pool
untouched         rounds at slices that they do not touch
pulls, replies    parameters on their way back to workers
replicate         updates on their way to backups (backups, seeding)
reconfigure       from one generation to the next; workers that go (worker_removal)
ring              votes of a ring (ring_service, ring_copies, encoded_sums); ring_sums: rounds for its reducer
snapshot_barrier  one snapshot point on all servers; cow_snapshot, saving and restore: checkpoints
cuts              slices as they were at one point, until a follower has read them
pool              the threads that apply rounds
dropped_options   options of workers that do not count in a round: reported once
state_transfer    `state_dict` and `load_state_dict`; lease_acks, waits: what the coordinator hears

A commit goes through `service.handle`, `Commits._commit`, `core.rounds.Rounds.commit`, `RoundExecutor.enqueue` and
`run`, `HostedSlice.drain`, `SliceRules.apply`, `RoundExecutor.reply`. Names that recur in these files:

slot              a `HostedSlice`; but `Stage.slot` and `StagedCommit.slot` number the worker's arenas (with a window)
part              a `core.layout.Slice`: where a slice begins and ends
work              a `SliceTask`, mostly a `RoundTask`: a decided round that the slices have yet to apply
flow              the `RoundExecutor`
item              `Commit.item`: the `StagedCommit` of a commit that the core has ordered
storage           the `SliceStorage` of a slice
admission_queue   commits that wait for the next generation
"""
