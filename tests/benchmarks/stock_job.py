"""The job that `latency.py` gives to a stock RQ worker."""

from __future__ import annotations

import time


def prepare(model: str) -> float:
    """Import and load what a GRPO job needs; return the time at which it could begin."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: F401

    AutoModelForCausalLM.from_pretrained(model)
    AutoTokenizer.from_pretrained(model)
    return time.time()
