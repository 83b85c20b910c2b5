"""`syncline bench`: how fast this machine, or a set of hosts, is with syncline, each figure against its floor.

rows      the rows, the jobs that measure them, and what a row's figures mean
jobs      starts those jobs and collects their figures
script    what the workers of such a job run: both sides of a row, in turns, in the same processes
links     the floors between two processes: plain sockets and plain TLS sockets
machine   describes the machine, and what other programs used of it meanwhile

Comparisons with other frameworks, and with older commits of this repository, are in `benchmarks/` of a checkout.
"""
