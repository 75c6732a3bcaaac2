"""State in Redis, and nothing else: jobs, queues, workers with their leases, and event streams.

The only package that builds Redis keys; `rq_format` alone imports RQ. Enters: job ids and changes
of their state, from clients and workers. Leaves: the next job for a worker, and the state of jobs.
Every change is one transaction (`states`). `workers` and `due` find what a killed process leaves
in Redis; the package `lifecycle` reconciles that with the disk.
"""
