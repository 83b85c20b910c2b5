"""Figures with their references: every row is measured beside something bare, in turns, and printed as a ratio.

row        what a row is, how hard to measure, what came out
rows       the rows there are
machine    the machine in words, and how much of it others used meanwhile
match      two sides taking turns: pairs of figures, taken right after each other
turns      how the bench tells a process that it is its turn, and hears how long it took
sides      starting the processes of one side: a real job, or some plain processes
worker     our side: the script that a job's workers run
floors     references without a framework: shared memory, a Unix socket, TCP
peers      references with torch: gloo, DistributedDataParallel, a fused step, the plain loop
models     the models that both sides train
"""
