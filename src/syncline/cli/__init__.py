"""The command line.

Layout: `main` finds a command. Each command has a file: run, roles (coordinator, server, worker), status (also
why and scale), pace, checkpoint, bench, chaos, doctor.

options            the options of a job, for `run` and `coordinator`
listing, standing  `syncline status`: all jobs; one job
screen             the terminal during `syncline run`
killing, witness   `syncline chaos`: ends members; records when steps are acknowledged
reckoning          `syncline chaos`: its figures
checks             `syncline doctor`: what is installed, what the machine has
connections        `syncline doctor`: how processes connect here
"""
