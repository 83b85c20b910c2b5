"""What outlives a process: the coordinator's journal, and checkpoints.

Layout, in reading order:

journal            the state of the coordinator, in SQLite
folders            where checkpoints are: on a local disk (`disk`), or on any file system of fsspec (`remote`)
checkpoints        the checkpoints of a folder: found, read, verified, written, pruned
tensors            the tensors of one file, by many threads
begun, mirror      which process began a checkpoint; its second copy
weights, averaging weights without a job; the mean of several checkpoints
series, media      readings of a run, and its images and texts, in SQLite
lines, spans       files of JSON lines that stay bounded; what `--trace` has written
trouble            errors of disks become errors of ours
"""
