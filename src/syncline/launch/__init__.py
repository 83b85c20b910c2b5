"""Starting a job: init(), local processes, other hosts.

Layout, in reading order:

start, embedded                     `syncline.init()`; a whole job in one process
running, folder, jobfile            `syncline run`: from settings to a job; its folder; the file that members join by
hosts, saving, own_codecs           checked before anything starts: places, checkpoint settings, the user's codecs
greeting, versions, code_transfer   other hosts: a look before the start; versions; the working folder
engine                              where members run: five verbs
launcher                            the loop of `syncline run`: sees a process end, decides whether it starts again
lives, processes, forkserver        processes: one life of each member; how one is started; forked from `preloaded`
restarts, oom                       which member starts again, and when; kills by the kernel for lack of memory
watching                            the launcher's connection to the coordinator: reports deaths, reads the status
forwarding, lifeline                output of members; the pipe that ends a member when its launcher is gone
tally, summary                      the table at the end: its facts, its lines
member                              the inside of a member's process, which plays one of the roles below
membership                          joins a job by its job file (core/membership is the list of members)
coordinating, serving, working      the roles
ringing                             in a ring: the server in a worker's process
world, rendezvous, ranks            a process of torchrun, mpirun or srun: its rank; the job; `init()`
rank_host                           beside rank 0 of such a launcher: the coordinator and the servers
threads, compiler, tracebacks       torch's threads and compiler; tracebacks without our frames
"""
