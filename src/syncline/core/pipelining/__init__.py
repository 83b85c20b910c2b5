"""Model parallelism, planned: which layers go to which worker, in how many micro-batches, and what a step costs.

costs          what is measured: layers, devices, links, memory
schedules      the orders of actions of torch.distributed.pipelining
simulation     a step played through: its time, bubble, utilisation; for one cut or for thousands at once
planning       the best contiguous stages, and the reason
searching      the exact search behind it
replanning     when a pipeline that runs is cut elsewhere
telling        what a pipeline does, in words
"""
