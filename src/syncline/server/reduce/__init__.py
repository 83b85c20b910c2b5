"""How a ring adds up the gradients of a round.

sums            the sums of a round: buckets, weights, means
reducer         the reducer of a generation, and what it has added up while a reconfiguration is on its way
process_group   by a process group of torch.distributed (gloo, nccl)
hierarchical    inside each host first, then between one leader per host
host_round      one round of the hierarchical reducer
"""
