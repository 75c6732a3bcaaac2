"""The same results as transformers and TRL on the same device, in float32."""

from __future__ import annotations

import tempfile
from pathlib import Path

import sft_jobs
import tiny
import torch
from engines import make, prompt

from warmd.jobs.context import WarmModel
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.request import End, Request, Sampling

from . import DEVICE, HAS_GPU, fact, like_a_horse

TOKENS = 24


def engine_tokens(engine: Engine, ids: list[list[int]]) -> list[str]:
    """Return the greedy completions of prompts, generated together."""
    requested = [
        Request(ids=one, sampling=Sampling(temperature=0), max_tokens=TOKENS) for one in ids
    ]
    for request in requested:
        engine.submit(request)
    texts = []
    for request in requested:
        text = ""
        while not isinstance(piece := request.pieces.get(timeout=60), End):
            text += piece.text
        if piece.error is not None:
            raise piece.error
        texts.append(text)
    return texts


def check_generation() -> None:
    """Compare greedy completions with transformers' generate."""
    tokenizer = tiny.tokenizer()
    model = make("Qwen2", vocab_size=len(tokenizer)).to(DEVICE)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    ids = [prompt(length, length) for length in (3, 40, 90, 33)]
    engine = Engine(WarmModel(name="m", path=Path("m"), model=model, tokenizer=tokenizer))
    ours = engine_tokens(engine, ids)
    engine.close()
    theirs = []
    for one in ids:
        given = torch.tensor([one], device=DEVICE)
        with torch.inference_mode():
            out = model.generate(given, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
        theirs.append(tokenizer.decode(out[0, len(one) :], skip_special_tokens=True))
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    fact(
        "greedy completions equal to transformers'",
        f"{same} of {len(ids)}",
        "all",
        same == len(ids),
    )


def check_training() -> None:
    """Compare five SFT steps with TRL's SFTTrainer."""
    with tempfile.TemporaryDirectory() as folder:
        (theirs, their_gradients), (ours, our_gradients) = (
            sft_steps(side, Path(folder)) for side in ("trl", "warmd")
        )
    losses = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    largest = max(float(gradient.abs().max()) for gradient in their_gradients)
    pairs = zip(their_gradients, our_gradients, strict=True)
    relative = max(float((a - b).abs().max()) for a, b in pairs) / largest
    fact("SFT losses beside TRL's, largest difference", losses, "< 1e-3", losses < 1e-3)
    fact("SFT gradients beside TRL's, relative", relative, "< 1e-3", relative < 1e-3)


def sft_steps(side: str, folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    """Train five steps; return the losses, and the gradients of the first step."""
    model = sft_jobs.small("qwen2", tie_word_embeddings=True).to(DEVICE)
    made = sft_jobs.trainer(side, folder, model, "chat", how={}, use_cpu=not HAS_GPU)
    logged, gradients, _ = sft_jobs.train(made)
    return [entry["loss"] for entry in logged if "loss" in entry], gradients


if __name__ == "__main__":
    like_a_horse()
    check_generation()
    check_training()
