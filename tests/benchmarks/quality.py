#!/usr/bin/env python3
"""What each precision costs in quality: perplexity and first tokens, beside llama.cpp's formats.

    python tests/benchmarks/quality.py TRAIN.jsonl TEST.jsonl --peers-venv DIR [--epochs 2]

Trains a Llama of width 512 and FFN 1,536 on the texts of TRAIN (all fields of each row, GSM8K for
example), in bfloat16 by torch, and keeps it in DIR. Then each side computes the same tokens of
TEST: warmd's decoder in each precision; llama.cpp on GGUF files of the same float32 weights that
its own quantizer wrote. Install llama.cpp first by `peers.py --peers-venv DIR --llama-cpp source`.

Prints a table in Markdown: perplexity; how many of the texts' last tokens are predicted as by
float32; the mean KL divergence of the predictions from those of float32, in nats.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import note, write_by_llamacpp
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from warmd.configs.precision import NATIVE, PRECISIONS
from warmd.jobs.bench import model as bench_model
from warmd.jobs.compute.device import processor_name
from warmd.jobs.compute.levels import instructions
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.parts import Part
from warmd.jobs.models.gguf.tokenizers import SPLITS

HERE = Path(__file__).parent
VOCABULARY = 4096
SHAPE: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512},
    **{"vocab_size": VOCABULARY, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
}
LENGTH, BATCH = 256, 16
TEXTS = 120  # of TEST that are compared
FORMATS = ("Q8_0", "Q4_K_M", "Q4_0")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--peers-venv", type=Path, required=True, help="folder with llama.cpp")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    folder = args.peers_venv / f"quality-{args.epochs}"
    if not (folder / "config.json").is_file():
        train(list(texts(args.train)), folder, args.epochs)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids[:LENGTH] for text in list(texts(args.test))[:TEXTS]]
    found: dict[str, list[np.ndarray]] = {}
    causal_lm = bench_model.read(folder)
    for precision in (NATIVE, *(each for each in PRECISIONS if each != NATIVE)):
        decoder = Decoder(causal_lm, precision=precision)
        if decoder.precision == precision:
            found[f"warmd {precision}"] = [log_probabilities(decoder, one) for one in ids]
    for kind in FORMATS:
        found[f"llama.cpp {kind}"] = list(of_llama(args.peers_venv, folder, kind, ids))
    sys.stdout.write(f"{processor_name()}, {instructions()}; {sum(map(len, ids)):,} tokens.\n\n")
    for line in table(found, ids):
        sys.stdout.write(line + "\n")


def texts(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        yield "\n".join(map(str, json.loads(line).values()))


def train(some: list[str], folder: Path, epochs: int) -> None:
    """Train the model, and write it into a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = byte_pairs(some)
    end = core.token_to_id("<|endoftext|>")
    stream = [token for one in core.encode_batch(some) for token in (*one.ids, end)]
    rows = torch.tensor(stream[: len(stream) // LENGTH * LENGTH]).view(-1, LENGTH)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=end, bos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    steps = epochs * (len(rows) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    begun = time.monotonic()
    for step in range(steps):
        if step % (len(rows) // BATCH) == 0:
            rows = rows[torch.randperm(len(rows))]
        batch = rows[step * BATCH % (len(rows) // BATCH * BATCH) :][:BATCH]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            note(f"step {step} of {steps}: loss {loss:.3f}, {time.monotonic() - begun:.0f} s")
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=core, eos_token="<|endoftext|>").save_pretrained(folder)
    model.save_pretrained(folder)


def byte_pairs(some: list[str]) -> Tokenizer:
    """Return a tokenizer that llama.cpp knows as `qwen2`."""
    expression = next(rules for rules, (name, _) in SPLITS.items() if name == "qwen2")
    tokenizer = Tokenizer(models.BPE())
    steps: Any = [
        pre_tokenizers.Split(Regex(expression), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(some, trainer)
    return tokenizer


@torch.inference_mode()
def log_probabilities(decoder: Decoder, ids: list[int]) -> np.ndarray:
    """Return the log-probabilities (T, V) of what follows each token."""
    logits = decoder.forward([Part(decoder.new(len(ids)), ids, True, wants_all_logits=True)])
    return logits.double().log_softmax(-1).numpy()


def of_llama(peers: Path, folder: Path, kind: str, ids: list[list[int]]) -> Iterator[np.ndarray]:
    python, gguf = peers / "venv" / "bin" / "python", folder / f"{kind}.gguf"
    if not gguf.is_file():
        write_by_llamacpp(python, folder, gguf, kind)
    command = [str(python), str(HERE / "quality_llamacpp.py"), str(gguf)]
    done = subprocess.run(command, input=json.dumps(ids).encode(), stdout=-1, check=True)
    every = np.frombuffer(done.stdout, np.float32).reshape(-1, VOCABULARY).astype(np.float64)
    every -= every.max(1, keepdims=True)
    every -= np.log(np.exp(every).sum(1, keepdims=True))
    place = 0
    for one in ids:
        yield every[place : place + len(one)]
        place += len(one)


def table(found: dict[str, list[np.ndarray]], ids: list[list[int]]) -> Iterator[str]:
    reference = found[f"warmd {NATIVE}"]
    yield "| | perplexity | same last token | KL divergence |"
    yield "| --- | --- | --- | --- |"
    for side, rows in found.items():
        losses = np.concatenate(
            [-row[range(len(one) - 1), one[1:]] for row, one in zip(rows, ids, strict=True)]
        )
        pairs = list(zip(rows, reference, strict=True))
        same = sum(int(row[-1].argmax() == other[-1].argmax()) for row, other in pairs)
        divergence = np.mean(
            [(np.exp(other) * (other - row)).sum(1).mean() for row, other in pairs]
        )
        perplexity = math.exp(losses.mean())
        yield f"| {side} | {perplexity:.4f} | {same} of {len(ids)} | {divergence:.2e} |"


if __name__ == "__main__":
    main()
