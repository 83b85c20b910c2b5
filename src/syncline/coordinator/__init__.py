"""The coordinator: who is in the job, where slices are, how the job goes on and ends."""
