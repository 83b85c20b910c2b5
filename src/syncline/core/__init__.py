"""Pure: no I/O, threads, clock or environment. Events in, actions out.

Layout, in reading order:

members            a member, its address, and the standing of a worker in the rounds
layout, registry   parameters cut into segments and slices; registrations, compared with the chief's
rule               how a parameter is updated, by name and numbers
aggregate          `--aggregate`: how the gradients of a round become one, number by number
policy             `--policy`: parsed, and what the other files ask of it
sync_interval      `--sync-every` and `--pull-every`: how often a worker exchanges with the servers
rounds             at each server: which commits are applied together, when, and for whom a round waits
slice_state        what goes with a slice besides its bytes: version, clocks, fences
replica_sets       the primary and the backups of each slice; promotion after a death; where slices move to
versions           of Python and packages: what all members must have in common
membership         at the coordinator: the members of the job, and all state that survives a crash; barriers
liveness           when a member counts as dead; whom a waiting job waits for
reconfigure        the next generation: what servers are told, and what follows from their answers
ring               what a ring needs besides: derived settings, votes, which server makes which sum
leasing/           which worker reads which samples
checkpoint/        checkpoints, without their bytes
codecs/            how numbers travel in fewer bytes
pipelining/        model parallelism: costs, schedules, a step simulated, the best stages, when to plan again
metrics            reports merged into readings
series             readings that are kept: thinned as they age
media              images, histograms and texts that a script reports
sinks              what `--sink` may name
conditions         `--stop` and similar expressions, parsed
stopping           stop rules, evaluated
validation         validations of all workers together
observing          what a job does now: figures of a second, from what its members tell
windows, verdicts  the last seconds added up; who makes a job slow, or what is wrong with it
tracing            `--trace`: the spans of all members on one clock
collectives        which bytes go from which rank to which, and what ranks must agree on
sizing, cores      how many workers pay off; which cores a member gets
settings, units    all small languages checked at once; numbers as text
repeats            log lines that would come by the thousand
wire/              the messages
"""
