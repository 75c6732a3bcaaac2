"""The truth on disk: the run directory of each job with spec, events, checkpoints and weights.

Everything here survives a lost Redis. Knows neither Redis nor other processes.
"""
