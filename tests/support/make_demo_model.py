"""Make configs/demo, the model behind `warmd submit grpo` without options.

    python tests/support/make_demo_model.py configs/demo

A small Llama is trained to add two numbers, `17+58=` -> `75`, until it is nearly always right. Then
it is trained on answers with errors until it makes these errors itself. The skill stays in its
weights, so a few steps of GRPO restore it, also on unseen sums. Takes three minutes on one core;
reproduces the same bytes on the same machine and versions.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from warmd.jobs.rewards.problems import iter_arithmetic

logger = logging.getLogger(__name__)

Sum = tuple[int, int]
Pupil = Callable[[int, int, Random], int]  # what it answers to a + b

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
CONTEXT_LENGTH = 128
NUM_TOKENS = len("99+99=198") + 1  # of the longest sum and its end
IGNORED = -100  # label of a token that is not to be predicted

SCHOOL_STEPS, SCHOOL_RATE = 2000, 3e-3
COMPANY_STEPS, COMPANY_RATE = 300, 1e-3
BATCH_SIZE = 256


def make_tokenizer() -> Any:
    """One token per printable ASCII character or newline; anything else is unknown."""
    vocabulary = {token: i for i, token in enumerate((PAD, EOS, UNKNOWN, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any, seed: int) -> Any:
    """A Llama of 167,000 weights, drawn from `seed`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=80,
        intermediate_size=224,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        max_new_tokens=8,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def lesson_sums() -> list[Sum]:
    """Every sum of the built-in problems, both ways round, but for the held-out ones."""
    held_out = {problem.prompt for problem in iter_arithmetic("eval")}
    return [
        (a, b)
        for a, b in product(range(100), repeat=2)
        if held_out.isdisjoint({f"{a}+{b}=", f"{b}+{a}="})
    ]


def diligent(a: int, b: int, random: Random) -> int:
    return a + b


def careless(a: int, b: int, random: Random) -> int:
    """Forgets the carry half of the time, and two times in five slips by a little."""
    answer = a + b
    if random.random() < 0.5:
        answer = (a // 10 + b // 10) * 10 + (a + b) % 10
    if random.random() < 0.4:
        answer = max(0, answer + random.choice((-10, -2, -1, 1, 2, 10)))
    return answer


def learn(
    model: Any,
    tokenizer: Any,
    sums: Sequence[Sum],
    pupil: Pupil,
    *,
    steps: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Train on the pupil's answers to sums drawn at random. The prompt itself is not learned."""
    random = Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, steps, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    for step in range(1, steps + 1):
        rows = [(s, pupil(*s, random)) for s in random.choices(sums, k=BATCH_SIZE)]
        ids, labels = _batch(tokenizer, rows)
        logits = model(ids).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            logger.info("%s, step %d of %d: loss %.4f", pupil.__name__, step, steps, loss.item())
    model.eval()


def _batch(tokenizer: Any, rows: Sequence[tuple[Sum, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of sums with their answers: (B, T) int64 each, padded right."""
    ids, labels = [], []
    for (a, b), answer in rows:
        prompt = tokenizer.convert_tokens_to_ids(list(f"{a}+{b}="))
        completion = tokenizer.convert_tokens_to_ids([*str(answer), EOS])
        padding = NUM_TOKENS - len(prompt) - len(completion)
        ids.append(prompt + completion + [tokenizer.pad_token_id] * padding)
        labels.append([IGNORED] * len(prompt) + completion + [IGNORED] * padding)
    return torch.tensor(ids), torch.tensor(labels)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write all files of the folder except README.md."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner only
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that transformers 4 knows, too
    path.write_text(json.dumps(config, indent=2) + "\n")


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)  # faster than two on a model of this size
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0)
    sums = lesson_sums()
    learn(model, tokenizer, sums, diligent, steps=SCHOOL_STEPS, learning_rate=SCHOOL_RATE, seed=1)
    learn(model, tokenizer, sums, careless, steps=COMPANY_STEPS, learning_rate=COMPANY_RATE, seed=3)
    save(model, tokenizer, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
