"""What can be done with a job, one module per verb: the only package that knows Redis and disk.

A job is a record in Redis (`queue`), a run directory (`runs`) and, with a bucket, a copy of that in
the run store (`store`); `Places` names the three. Every way to a new job leads through `submit`.
A process that is killed anywhere leaves what `adopt`, `recover`, `remove` and `index` find again.
"""
