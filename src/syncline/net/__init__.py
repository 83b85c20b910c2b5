"""Frames, sockets, shared memory, the in-process twin, and calls over any of them.

Layout, in reading order:

transport                           the seam: what a connection can do
frame                               a message as bytes
tcp, memory                         the two implementations: sockets (with `connection`), and calls in one process
streams, stalls                     bytes over a socket, with and without TLS; a peer that does not read
handshake, proving, certificate     the proof of the job token: the algorithm, over a socket, the certificate in it
rpc                                 calls in both directions: `Endpoint`, `Call`, `Request`
link                                the link to a coordinator that may die: requests are repeated
tracing                             what a member has traced, sent to its coordinator; how far apart their clocks are
reliable_send                       messages between servers: repeated until they are acknowledged
shm                                 memory that processes of a host share
device_channel, device_memory       the way past it on a GPU; GPU memory that processes share
"""
