"""What members say to each other.

message        the base of all messages
tables         the number of each message on the wire, and which role may send it
control        between members and the coordinator
traffic        between workers and servers
following      between followers and the job: parameters, one cut after another
leases         samples: epochs, leases, acknowledgements
checkpoints    saves, snapshots, resume
validation     validations and their results
collectives    between workers
pace           a worker that is slowed or held by hand
tracing        spans on their way to the coordinator
agents         between a launcher and its agents on other hosts
"""
