"""Benchmarks that a user can run: warmd's steps, a stock library's on the same work, the floor.

`machine` measures what the processor and the memory can do; each other module is one kind of job.
"""
