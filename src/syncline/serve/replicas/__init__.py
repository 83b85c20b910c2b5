"""Several processes behind one port: `--replicas N`.

process             the frame of a process that a keeper starts
messages, link      what keeper, loader and replicas say to each other, and how: messages with descriptors
lives               when a process starts again, and when a silent one is killed (pure)
keeper              holds the sockets and the memory of all versions; starts the other processes; runs no model
loader              reads new versions, tries them, and decides which one answers
replica             answers requests
"""
