"""Workers: each takes jobs from one queue and supervises the horses that run them.

`queue.mailbox` receives jobs, `horse_pool` requests horses from the zygote, and `attempt` turns the
end of an execution into one change in Redis. `watchdog` detects stalls. Imports no torch.
"""
