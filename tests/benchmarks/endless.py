"""A warm model that never ends an answer by itself: each has all the tokens that are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from warmd.jobs.allocator import keep_freed_memory
from warmd.jobs.context import WarmModel
from warmd.jobs.engine.turns import without_helpers


def endless(folder: Path, auto: Any) -> WarmModel:
    """Read the model in `folder` by a class of transformers' Auto classes."""
    model = auto.from_pretrained(folder).requires_grad_(False).eval()
    model.generation_config.eos_token_id = None
    keep_freed_memory()  # as a work horse does
    with without_helpers():
        for parameter in model.parameters():  # as warm as the zygote's: in memory, not on the disk
            parameter.sum()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    return WarmModel(name="m", path=folder, model=model, tokenizer=tokenizer)
