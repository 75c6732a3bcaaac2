"""Workers: each takes jobs from one queue and supervises the horses that run them.

`worker` is the loop. `taking` fills free slots with jobs, `job_horses` requests horses for them and
receives their messages, and `attempt` turns the end of an execution into one change in Redis.
`leaving` ends jobs on signals and with the lease, `watchdog` detects stalls. `gangs` are jobs of
several nodes: `gathering` nodes, `leading`, or having `seats`. Imports no torch.
"""
