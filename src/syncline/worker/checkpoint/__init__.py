"""A worker's part in checkpoints: the state of its script is saved, and put back when a job or a worker resumes.

Layout, in reading order:

saves         ScriptCheckpoints, what a job has; a worker's part in a save
boundary      the moments at which all that a script has read is in commits
script_state  `job.state`: what a script wants to have again
resume        notes for a restart, and putting back what was saved
encoding      a script's state as a tree of JSON and tensors
rng_state     random states, and `seed_everything`
"""
