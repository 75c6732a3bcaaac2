"""Workers: each takes jobs from one queue and supervises the horses that run them.

A job enters from `queue.mailbox`; a request for a horse leaves to the zygote (`horse_pool`); the
end of a job becomes one change in Redis (`attempt`). `watchdog` detects stalls. Imports no torch.
"""
