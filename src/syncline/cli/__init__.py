"""The command line.

Layout: `main` finds a command. Each command has a file: run, attach (also stop), roles (coordinator, server, worker),
status (also why and scale), pace, checkpoint, plan_stages, bench, chaos, doctor; top, page, trace, report (also
compare) for what a run does and did; serve, serve_ctl, export for its model; worker_env, manifest for other engines.

options            the options of a job, for `run` and `coordinator`
model_options      the options that `serve` and `export` share
planning           `--stages auto`: planned before a job starts
detached           the process of a detached job's launcher
ray, slurm         `syncline run` on Ray and on Slurm
listing, standing  `syncline status`: all jobs; one job
screen             the terminal during `syncline run`
killing, witness   `syncline chaos`: ends members; records when steps are acknowledged
reckoning          `syncline chaos`: its figures
checks             `syncline doctor`: what is installed, what the machine has
connections        `syncline doctor`: how processes connect here
engines            `syncline doctor --on ENGINE`: whether an engine can start a job
"""
