"""Pure: no I/O, threads, clock or environment. Events in, actions out."""
