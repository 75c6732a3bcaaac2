"""Experiment trackers (`report_to`) whose run must end with the training.

The Trainer of transformers leaves the end of a Weights & Biases run to the exit of the interpreter.
A work horse has no such exit: it ends by os._exit, after killing the processes of the job. The
process that writes and uploads the run would be killed, and the run would be lost.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

WANDB = "wandb"

log = logging.getLogger(__name__)


@contextmanager
def tracked(job_id: str, trackers: Collection[str]) -> Iterator[None]:
    """Start a run of the training in each tracker, and end it with the block.

    A run of Weights & Biases has the id of the job: a resumed job continues it. If it cannot be
    ended, the log says so: the training is done.
    """
    if WANDB in trackers:
        os.environ["WANDB_RUN_ID"] = job_id
        os.environ["WANDB_RESUME"] = "allow"
    try:
        yield
    finally:
        if WANDB in trackers and (wandb := sys.modules.get(WANDB)) is not None:
            _finish(wandb)


def _finish(wandb: Any) -> None:
    try:
        wandb.finish()
    except Exception:  # network and service raise dozens of types
        log.warning("the run of %s could not be ended", WANDB, exc_info=True)
