"""Engines that start members elsewhere: agents run where Slurm has room, and start members for the launcher.

Layout, in reading order:

agent                       starts members on its host for a launcher on another one
hub, agents                 the launcher's side: who is there; an engine whose members agents start
awake                       a clock for deadlines, on a host that may be suspended
slurm, slurm_submit         Slurm: inside a step of srun; as a batch job
ray_cluster, ray_agents     Ray: its hosts and room; actors that hold agents
host_agents, detached       one agent on each host; a job that goes on without a terminal
kubernetes                  manifests of a job

The launcher, its coordinator and its verdict are those of any job. Nothing here is imported by `import syncline`.
"""
