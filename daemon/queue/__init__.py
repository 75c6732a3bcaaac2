"""State in Redis: jobs, queues, workers with their leases, and event streams.

The only package that builds Redis keys; `rq_format` alone imports RQ. Enters: job ids and changes
of their state, from clients and workers. Leaves: the next job for a worker, and the state of jobs.
Every change is one transaction (`transactions`). `workers`, `due`, `removal` and `adoption` find
and reconcile what a killed process leaves behind.
"""
