"""A device-side assert ends the process of an engine, so that it affects no later request."""

from __future__ import annotations

import subprocess
import sys

from warmd.jobs.errors import LOST_CONTEXT_EXIT

from . import fact, needs_gpu

# Serves a request, then one in which a kernel reads beyond a tensor.
ENGINE = """
import torch
from pathlib import Path
import tiny
from engines import make, prompt
from warmd.jobs.context import WarmModel
from warmd.jobs.engine.request import End, Request, Sampling
from warmd.jobs.engine.engine import Engine

warm = WarmModel(name="m", path=Path("m"), model=make("Qwen2").cuda(), tokenizer=tiny.tokenizer())
engine = Engine(warm)

def ask():
    request = Request(ids=prompt(4), sampling=Sampling(temperature=0), max_tokens=3)
    engine.submit(request)
    while not isinstance(piece := request.pieces.get(timeout=30), End):
        pass
    print("failed" if piece.error else "served", flush=True)

ask()
forward = engine._runner.forward
def broken(parts):
    torch.zeros(4, device="cuda")[torch.tensor([10**6], device="cuda")]
    return forward(parts)
engine._runner.forward = broken
ask()
ask()
"""

if __name__ == "__main__":
    needs_gpu()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENGINE], stdout=subprocess.PIPE, text=True
    )
    fact("before the assert", done.stdout.split()[:1], "served", done.stdout.startswith("served"))
    is_ended = done.returncode == LOST_CONTEXT_EXIT
    fact("exit code of the process", done.returncode, str(LOST_CONTEXT_EXIT), is_ended)
