"""How numbers of several ranks become one.

kernels         sum, mean, minimum, maximum and product of numbers of several ranks; weighted sums
slices          one slice: how contributions become its sum
rounds          a round: contributions, early stages, and the round that is expected next
reducer         the seam: what a server asks of a reducer, and what a reducer asks of its server
hierarchical    a reducer: inside each host first, in shared memory, then between one leader per host
host_round      the sums of one server in one round of it
process_group   a reducer: torch.distributed (gloo, nccl); the only file that imports torch

`syncline.collectives` and servers use the kernels; rings use all of it. The hierarchical reducer does not need torch.
"""
