"""Workers among themselves: collectives over shared memory and sockets.

Layout, in reading order:

verbs          what scripts call; `syncline.collectives` is its public face
calls          who runs a call: the script's thread, or the thread of a queue of tickets; retries
groups         who takes part; which calls may meet; the links to all members; small calls that are cached
rendezvous     all describe their call and check that the descriptions agree; a cached call, repeated
incoming       what others say, until a call takes it; how a call waits for it
transfer       bytes from each rank to each; all-reduce in shared memory and around a ring of hosts
pairs          from one to one: send and recv
values         arrays and tensors as bytes, and back; values of several ranks reduced to one
shared_memory  memory that the ranks of a host share
peers          links to the other workers
"""
