"""A synthetic causal language model: random weights in a given shape.

    python -m warmd.jobs.bench.model grpo|sft|dpo|infer WORK FOLDER

Both sides of a benchmark map its weights from FOLDER, as they would those of a real model. Imports
torch and transformers when it makes or reads a model.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from . import works
from .works import Shape


def make(shape: Shape, folder: Path) -> None:
    """Write a float32 model into a folder: 2 GB for the 24 layers of a 0.5B model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **shape.settings())
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def read(folder: Path) -> Any:
    """Return the model of a folder on the measured device, in eval mode and without gradients.

    On a CPU its weights are mapped.
    """
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    from ..models.pretrained import load
    from .machine import device

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder)
    model = load("causal-lm", folder, config=config, dtype=torch.float32).model
    return model.to(device()).requires_grad_(False).eval()


def tokenizer(shape: Shape) -> Any:
    """Return a tokenizer whose words are the numbers from 2 on, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Special tokens are also matched within words, so none may be part of a number.
    words = ["<pad>", "<eos>", *map(str, range(2, shape.vocab_size))]
    ids = {word: number for number, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def prompts(shape: Shape, length: int, count: int) -> list[str]:
    """Return texts of random words, each of `length` tokens."""
    draw = random.Random(0)
    return [
        " ".join(str(draw.randrange(2, shape.vocab_size)) for _ in range(length))
        for _ in range(count)
    ]


if __name__ == "__main__":
    kind, work, folder = sys.argv[1:]
    shapes: dict[str, Any] = {
        "grpo": works.GRPO,
        "sft": works.SFT,
        "dpo": works.DPO,
        "infer": works.INFER,
    }
    make(shapes[kind][work].shape, Path(folder))
