"""Workers among themselves: collectives over shared memory and sockets.

verbs        what scripts call; `syncline.collectives` is its face
calls        made by the script's thread or that of tickets, and made again when members come or leave
values       arrays and tensors as bytes, and back
groups       who takes part
attempts     which calls may meet: those of scripts that began together
party        the same, with the ways to them
meeting      one call, with all who take part
meetings     all describe what they have called, and see whether it is the same
waiting      for one another: until when, what ends it, what is said meanwhile
hearing      what others say, as it comes in
habits       small calls that are made again and again: what is said of them every time
repeating    such a call, made again: what others say is compared as bytes
streams      what one other worker has said, and was not taken yet
memories     memory that ranks of a host share: mine, and that of others
reducing     numbers of several ranks become one, block by block
moving       bytes from each to each
ring         all-reduce: inside a host in shared memory, between hosts around a ring
pairs        from one to one: send and recv
tickets      what was called and not waited for
"""
