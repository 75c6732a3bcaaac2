"""Decode steps as CUDA graphs: the logits of the plain pass, and graphs that outlive others."""

from __future__ import annotations

import torch
from engines import make, prompt

from warmd.jobs.compute.quantized import CastLinear
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.parts import Part

from . import DEVICE, fact, like_a_horse, needs_gpu


def largest_difference(plain: Decoder, stepped: Decoder, counts: tuple[int, ...]) -> float:
    """Decode some sequences in both; return the largest difference of a logit."""
    caches = [[decoder.new(400) for decoder in (plain, stepped)] for _ in range(max(counts))]
    largest = 0.0
    for number, count in enumerate((max(counts), *counts)):
        ids = [prompt(40 + row, row) if number == 0 else [number] for row in range(count)]
        one, other = (
            decoder.forward([Part(caches[row][i], ids[row], True) for row in range(count)])
            for i, decoder in enumerate((plain, stepped))
        )
        largest = max(largest, float((one - other).abs().max()))
    return largest


if __name__ == "__main__":
    like_a_horse()
    with torch.inference_mode():
        model = make("Qwen2").to(DEVICE)
        plain = Decoder(model, use_cuda_steps=False)
        stepped = Decoder(model, use_cuda_steps=True)
        found = largest_difference(plain, stepped, (1, 3, 3, 2, 1, 3))
        fact("largest difference of a logit", found, "< 1e-3", found < 1e-3)
        needs_gpu()
        # Graphs of one decoder are dropped; those of another must keep working (pytorch#193402).
        other = Decoder(model, use_cuda_steps=True)
        found = largest_difference(plain, other, (1, 2))
        other._cuda_steps._graphs.clear()  # type: ignore[union-attr]
        del other
        torch.cuda.empty_cache()
        found = largest_difference(plain, stepped, (1, 3))
        fact("the same after another decoder's graphs are gone", found, "< 1e-3", found < 1e-3)
        # Graphs that were captured before an update of the weights compute with the new ones.
        live = Decoder(model, make=CastLinear, use_cuda_steps=True)
        largest_difference(Decoder(model, make=CastLinear, use_cuda_steps=False), live, (1, 3))
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
        live.refresh()
        fresh = Decoder(model, make=CastLinear, use_cuda_steps=False)
        found = largest_difference(fresh, live, (1, 3))
        fact("the same in bfloat16 after an update of the weights", found, "< 2e-2", found < 2e-2)
