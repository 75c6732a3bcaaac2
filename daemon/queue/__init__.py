"""State in Redis: jobs, queues, workers with their leases, and event streams.

The only package that imports rq and builds Redis keys. Every change of a job's state is
one transaction (`transactions`). `workers`, `due`, `removal` and `adoption` find and reconcile what
a killed process leaves behind.
"""
