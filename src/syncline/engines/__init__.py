"""Engines that start members elsewhere: agents run where Slurm has room, and start members for the launcher.

The launcher, its coordinator and its verdict are those of any job. Nothing here is imported by `import syncline`.
"""
