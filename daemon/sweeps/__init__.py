"""Sweeps: jobs that differ in options or seeds, with one id for all of them.

`plan` defines the jobs, `folder` holds the state on disk, `members` submits the jobs, `scores`
reads their results, and `halving` decides which of them train longer. `__main__` is the process
that does so for all sweeps of a home, so that no client needs to stay connected.

Terms: a sweep has points (combinations of values of its options), a point has members (jobs, one
per seed), and a rung is a step at which the points are compared.
"""
