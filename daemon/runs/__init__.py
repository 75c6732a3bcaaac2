"""The run directory of each job: spec, events, checkpoints and weights on disk.

Authoritative: everything here survives a lost Redis. `rundir` creates and locks the directory,
`events` appends to the event log, `checkpoints` commits and verifies checkpoints, `weights` finds
the model of a job. Enters: documents and files of a job. Leaves: the same, verified. Knows neither
Redis nor other processes.
"""
