"""What a worker reads: samples are leased by the coordinator, range by range.

Layout, in reading order:

loop     a loop over an epoch: the batches of a script, and what becomes of the rest at its end
leases   what to read next in an epoch; what is read, held and committed
samples  all that the loaders of a job have in common
"""
