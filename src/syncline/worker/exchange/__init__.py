"""How a worker's gradients become new parameters: they go to the servers that host their slices, and what these
servers make of them comes back.

Layout, in reading order:

servers        ServersExchange: what the rest of a worker calls
commit         one commit over all servers: the push, the state machine, each server's part, the ticket
sending        puts a commit on its way: what each server is told, and which bytes it must be sent
receiver       how new parameters come in from one server
targets        where they go: a flat buffer, or the caller's arrays
routes         which server is the primary of which slice; connections, shared memory, arenas
replay         when servers change: take over the newest roster, send again whatever is open
participation  whether rounds count this worker: rests, barriers, entering and leaving
finite         refuses pushes that are not finite; copies with digests
norm           the norm of a push over all its gradients
residuals      pushes encoded by a codec, and what an encoding leaves out
values         outside of commits: first values, pulls, the state of rules, a worker's copies of slices
"""
