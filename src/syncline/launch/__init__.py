"""Starting a job: init(), local processes, other hosts."""
