"""What outlives a process: the coordinator's journal, and checkpoints."""
