"""Workers: each takes jobs from one queue and supervises the horses that run them.

`worker` is the loop. `taking` fills free slots with jobs, `horses` requests horses for them and
receives their messages, and `attempt` turns the end of an execution into one change in Redis.
`held` is what a worker holds and how it gives it up: on signals and with the lease. `watchdog`
detects stalls. `gangs` are jobs of several nodes, in which others have `seats`. Imports no torch.
"""
