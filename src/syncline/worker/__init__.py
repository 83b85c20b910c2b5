"""Inside a worker: the job, its keys and values, and the exchange. Needs NumPy only."""
