"""Device memory: what an engine needs beyond the weights, the share limit, and the refusal."""

from __future__ import annotations

import torch
from engines import make

from warmd.configs.units import format_size
from warmd.jobs.compute.device import free_bytes
from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.errors import JobFailed
from warmd.jobs.sequences.passes import tokens_that_fit
from warmd.jobs.training.device_copies import HostReader

from . import DEVICE, fact, like_a_horse, needs_gpu, seconds

WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 8000}


def added(model: torch.nn.Module, precision: str) -> float:
    """Return the memory of a decoder in addition to the model's weights, as a share of them."""
    weights = sum(weight.nbytes for weight in model.parameters())
    before = torch.cuda.memory_allocated()
    decoder = Decoder(model, precision=precision)
    found = (torch.cuda.memory_allocated() - before) / weights
    del decoder
    return found


if __name__ == "__main__":
    like_a_horse()
    device = torch.device(DEVICE)
    fact("free memory", format_size(free_bytes(device)))
    fits = tokens_that_fit(make("Qwen2").requires_grad_(True), device)
    fact("tokens of a pack of a tiny model", fits, "4096", fits == 4096)
    needs_gpu()
    difference = abs(free_bytes(torch.device("cuda")) - free_bytes(device))
    fact("free memory of `cuda` and of `cuda:0`, difference", difference, "0", difference == 0)
    for dtype in (torch.float32, torch.bfloat16):
        model = make("Qwen2", **WIDE).to(device, dtype)
        for precision in ("native", "bf16"):
            is_cast = dtype == torch.float32 and precision == "bf16"
            found = added(model, precision)
            ok = found < (0.6 if is_cast else 0.1)
            expected = "< 0.6: a copy in bf16" if is_cast else "< 0.1"
            fact(f"{dtype}, {precision}: decoder / weights", found, expected, ok)
        del model
    there = torch.randn(2**28, device=device)
    reader = HostReader(device)
    took = seconds(lambda: reader.read(there))
    fact("a checkpoint's copy to the host, GB/s", there.nbytes / 1e9 / took, "> 4, pageable 1.5-8")
    is_same = torch.equal(reader.read(there), there.cpu())
    fact("the copy has the same bits", is_same, "True", is_same)
    del there
    torch.cuda.empty_cache()
    whole = free_bytes(device)
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    found = free_bytes(device) / torch.cuda.mem_get_info()[1]
    fact("free memory with gpu_memory=25%, share", found, "<= 0.25", 0 < found <= 0.25)
    try:
        with torch.device("meta"):
            tokens_that_fit(
                make(
                    "Qwen2", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80
                ).requires_grad_(True),
                device,
            )
        fact("training of 70B parameters", "admitted", "refused", False)
    except JobFailed as error:
        fact("training of 70B parameters", str(error), "refused", True)
    fact("free memory without a share", format_size(whole))
