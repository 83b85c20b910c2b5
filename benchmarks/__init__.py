"""Comparisons with other frameworks and with bare loops, from a checkout: `python -m benchmarks`, `make bench`.

`benchmarks.check` (`make bench-check`) compares two commits instead; `verdict` says which one is slower.

Every row is measured beside its reference, in turns, and printed as a ratio. In reading order:

command      the command line
figures      its table and its JSON
row          what a row is, how hard to measure, what came out
rows         the rows there are, of these kinds:
  moving       bytes between processes
  collecting   all-reduce among workers
  spanning     steps between hosts: ring and servers, codecs
  training     steps of a model
  leases       samples handed out
  reading      files to batches
  footprint    memory
  starting     until the first step, which the script first_step makes, beside torch alone and beside plain python
efficiency   of a series of rows, by the number of workers
words        prints figures
memory       how much memory a process has
match        two sides taking turns: pairs of figures, taken right after each other
turns        tells a process that it is its turn, and reads how long it took
task         what a process does in its turns
sides        starting the processes of one side: a real job, or some plain processes
namespaces   two hosts on one machine, and a job that spans them
switch       several of them, and how many bytes they send
reader       both sides of what is read
worker       our side: the script that a job's workers run
floors       references without a framework: shared memory, a Unix socket, TCP
tls          another one: a TLS echo between two hosts
mpi          Open MPI's all-reduce, where it is installed
peers        references with torch: gloo, DistributedDataParallel, a fused step, the plain loop
models       the models that both sides train; the large one is in transformer
"""
