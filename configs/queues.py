"""The queues: a worker takes jobs from one of them, a job kind names the one for its jobs.

The names are stored in Redis, in run directories and in `config.yaml`.
"""

from __future__ import annotations

TRAIN = "train"
INFER = "infer"
QUEUES = (TRAIN, INFER)
