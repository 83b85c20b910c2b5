"""Frames, sockets, shared memory, the in-process twin, and calls over any of them."""
