"""warmd's engine as a child of `peers.py`.

python tests/benchmarks/peer_warmd.py FOLDER PRECISION
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from warmd.daemon.fork.libraries import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # as in the daemon, before the libraries are imported

import torch
import transformers
from peer_child import THREADS, Answer, Burst, serve

import warmd
from warmd.jobs.bench import model
from warmd.jobs.context import WarmModel
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.request import End, Request, Sampling
from warmd.jobs.engine.speculation import NoDrafts

WARM_UP = (100, 40)  # tokens of a prompt and new ones, until the engine has packed all layers


def start(folder: Path, precision: str) -> tuple[str, Burst]:
    torch.set_num_threads(THREADS)
    causal_lm = model.read(folder)
    causal_lm.generation_config.eos_token_id = None  # no early end
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    warm = WarmModel(name="peer", path=folder, model=causal_lm, tokenizer=tokenizer)
    engine = Engine(warm, precision=precision, speculation=NoDrafts())  # as the peers

    def burst(prompts: Sequence[Sequence[int]], tokens: int) -> Answer:
        sampling = Sampling(temperature=0)
        requests = [Request(ids=ids, sampling=sampling, max_tokens=tokens) for ids in prompts]
        began = time.perf_counter()
        for request in requests:
            engine.submit(request)
        last_s, texts = [], []
        for request in requests:
            text = ""
            while not isinstance(piece := request.pieces.get(), End):
                text += piece.text
            if piece.error is not None:
                raise piece.error
            last_s.append(time.perf_counter() - began)
            texts.append(text)
        first_s = [
            last - request.stats.decode_s for last, request in zip(last_s, requests, strict=True)
        ]
        return Answer(first_s, last_s, texts)

    prompt, tokens = WARM_UP
    burst([list(range(prompt))], tokens)
    while engine.has_idle_work:
        time.sleep(0.1)
    if engine.precision != precision:
        raise RuntimeError(f"{precision} is not served on this machine")
    return f"warmd {warmd.__version__}, torch {torch.__version__}", burst


if __name__ == "__main__":
    serve(lambda: start(Path(sys.argv[1]), sys.argv[2]))
