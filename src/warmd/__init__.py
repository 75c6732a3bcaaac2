"""warmd: a persistent warm-model daemon with a job queue."""

__version__ = "0.1.0"
