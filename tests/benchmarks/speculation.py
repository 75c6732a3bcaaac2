#!/usr/bin/env python3
"""Speculative decoding with a forced share of right drafts, compared with steps of one token.

    PYTHONPATH=tests/support python tests/benchmarks/speculation.py [--rounds 3] [--tokens 200]
        [--precisions int8,bf16,native] [--batches 1,8] [--layers 24]

A model of random weights in the shape of Qwen2 0.5B. Its greedy completions are recorded first, and
are then the drafts, of which a share is replaced by other tokens: so the share of right drafts is
known, whatever a random model writes. The same engine computes without drafts and with them, in
turns: prompts of 100 tokens, in the prefix cache already. It knows nothing of the share; it has to
measure it, and the seconds of its steps, from the first request on.

Prints a table: medians of tokens per second over the rounds, and of the rounds' ratios, also by the
processor time of the process, which other programs change less.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from warmd.daemon.fork.libraries import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # as in the daemon, before the libraries are imported

import torch
from drafting import RecordedLookup

from warmd.jobs.bench import model
from warmd.jobs.bench.works import INFER
from warmd.jobs.compute.device import processor_name
from warmd.jobs.compute.levels import instructions
from warmd.jobs.context import WarmModel
from warmd.jobs.engine.drafts import Lookup
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.request import End, Request, Sampling
from warmd.jobs.engine.speculation import Speculation

Text = dict[tuple[int, ...], list[int]]  # completions by prompt, as token ids

SHARES = (0.0, 0.3, 0.6, 0.9)
PROMPT = 100  # tokens


class PartlyRight(Speculation):
    """Drafts recorded completions, of which a share is wrong, where it expects that to pay."""

    def __init__(self) -> None:
        super().__init__()
        self.predicted: Mapping[tuple[int, ...], Sequence[int]] | None = None  # None: no drafts

    def lookup(self, ids: Sequence[int]) -> Lookup | None:
        if self.predicted is None:
            return None
        return RecordedLookup(self.predicted[tuple(ids)], self._rates)


@dataclass(frozen=True)
class Run:
    """One completion of all prompts."""

    tokens_s: float  # after the first tokens
    cpu_s: float
    text: Text


def complete(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
    """Complete all prompts at once."""
    begun = time.process_time()
    requests = [
        Request(ids=ids, sampling=Sampling(temperature=0), max_tokens=tokens) for ids in prompts
    ]
    for request in requests:
        engine.submit(request)
    found: Text = {}
    for request in requests:
        ids: list[int] = []
        while not isinstance(piece := request.pieces.get(), End):
            ids += piece.ids
        if piece.error is not None:
            raise piece.error
        found[tuple(request.ids)] = ids
    seconds = max(request.stats.decode_s for request in requests)
    return Run(len(prompts) * (tokens - 1) / seconds, time.process_time() - begun, found)


def replaced(text: Text, share: float, vocabulary: int, seed: int) -> Text:
    """Return texts of which a share is kept, and the rest replaced by other tokens."""
    draw = random.Random(seed)
    return {
        prompt: [one if draw.random() < share else (one + 1) % vocabulary for one in ids]
        for prompt, ids in text.items()
    }


def compare(warm: WarmModel, precision: str, options: argparse.Namespace) -> None:
    """Print the lines of one precision."""
    speculation = PartlyRight()
    engine = Engine(warm, precision=precision, speculation=speculation)
    vocabulary = warm.model.config.vocab_size
    draw = random.Random(0)

    def run(predicted: Text | None) -> Run:
        speculation.predicted = predicted
        return complete(engine, prompts, options.tokens)

    for batch in options.batches:
        prompts = [[draw.randrange(10, vocabulary) for _ in range(PROMPT)] for _ in range(batch)]
        text = run(None).text
        run(replaced(text, 0.5, vocabulary, 0))
        while engine.has_idle_work:
            time.sleep(0.1)
        for share in SHARES:
            rounds: list[tuple[Run, Run]] = []
            for number in range(options.rounds):
                pair = run(None), run(replaced(text, share, vocabulary, number))
                assert all(one.text == text for one in pair)
                rounds.append(pair)
            show(engine.precision, batch, share, *figures(rounds))
    engine.close()


def figures(rounds: Sequence[tuple[Run, Run]]) -> list[str]:
    """Return the last cells of a line."""
    without, with_drafts = (
        statistics.median(one.tokens_s for one in side) for side in zip(*rounds, strict=True)
    )
    ratio = statistics.median(other.tokens_s / one.tokens_s for one, other in rounds)
    of_cpu = statistics.median(one.cpu_s / other.cpu_s for one, other in rounds)
    return [f"{without:.1f}", f"{with_drafts:.1f}", f"{ratio:.2f}", f"{of_cpu:.2f}"]


def show(*cells: object) -> None:
    """Print a line of the table."""
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200, help="of a completion (default: 200)")
    parser.add_argument("--precisions", default="int8,bf16,native")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    options.batches = [int(batch) for batch in options.batches.split(",")]
    shape = replace(INFER["0.5b"].shape, layers=options.layers)
    sys.stdout.write(f"{processor_name()}, {instructions()}, {torch.get_num_threads()} threads\n\n")
    columns = "precision", "sequences", "right drafts", "without, tok/s", "with, tok/s", "ratio"
    show(*columns, "by processor time")
    show(*["---"] * (len(columns) + 1))
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model.make(shape, Path(folder))
        causal_lm = model.read(Path(folder))
        causal_lm.generation_config.eos_token_id = None  # no early end
        tokenizer = model.tokenizer(shape)
        tokenizer.eos_token = None
        warm = WarmModel(name="bench", path=Path(folder), model=causal_lm, tokenizer=tokenizer)
        for precision in options.precisions.split(","):
            compare(warm, precision, options)


if __name__ == "__main__":
    main()
