"""Which worker reads which samples: each sample once in an epoch, and none lost.

ranges         ranges of positions, and of places along a lease
order          the order of an epoch, and its parts by rank
loader         what a loader has: its samples, batches and seed
ledger         one epoch: what is leased, done and left
shares         who gets how much, by measured speed
leases         all epochs of a job, and the decisions about them
queue          requests that wait for a lease
progress       how far the epochs are
"""
