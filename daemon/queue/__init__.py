"""State in Redis: jobs, queues, workers with their leases, and event streams.

The only package that imports rq and builds Redis keys. Every change of a job's life is one
transaction (`transactions`). What a killed process leaves behind is found and reconciled by
`workers`, `due`, `removal` and `adoption`.
"""
