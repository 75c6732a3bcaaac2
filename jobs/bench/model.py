"""A causal language model with random weights, made from the numbers of a shape alone.

    python -m warmd.jobs.bench.model grpo|sft|infer WORK FOLDER

Both sides of a benchmark map the weights in its folder, as they would those of a real model;
nothing is read from anywhere else. Imports torch and transformers when it makes or reads one.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from . import works
from .works import Shape


def make(shape: Shape, folder: Path) -> None:
    """Write a model in float32: 2 GB for the 24 layers of a 0.5B one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **shape.settings())
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def read(folder: Path) -> Any:
    """Return the model of a folder, in eval mode and without gradients, its weights mapped."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.requires_grad_(False).eval()


def tokenizer(shape: Shape) -> Any:
    """Return a tokenizer whose words are numbers from 2 on, each of them its own token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Special tokens are looked for within words, too: they may be no part of a number.
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
    shapes: dict[str, Any] = {"grpo": works.GRPO, "sft": works.SFT, "infer": works.INFER}
    make(shapes[kind][work].shape, Path(folder))
