"""How a job comes to life: init(), local processes, other hosts."""
