"""The zygote does not touch CUDA; its horses compute on the GPU, and their start-up time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from warmd.daemon.fork.libraries import ENVIRONMENT

from . import HAS_GPU, fact

# Boots a zygote with the demo model, and forks three horses from it; the last copies its weights
# with pinned buffers.
ZYGOTE = """
import json, os, sys, time
from pathlib import Path
from warmd.configs.config import ModelConfig
from warmd.daemon.fork import libraries
from warmd.daemon.fork.models import WarmModels
from warmd.daemon.fork.own_device import own_device
from warmd.daemon.fork.placement import Placement
libraries.import_libraries()
import torch
folder = Path(sys.argv[1])
models = WarmModels(64 << 30)
warm = models.ensure(ModelConfig(name="m", path=str(folder)), folder, in_use=()).warm
maps = Path("/proc/self/maps").read_text()
print(json.dumps({"initialized": torch.cuda.is_initialized(), "libcuda": "libcuda.so" in maps}))
sys.stdout.flush()
for copy_threads in (0, 0, 4):
    libraries.pause_openmp()
    begun = time.perf_counter()
    if os.fork() == 0:
        try:
            own = own_device("auto")
            device_s = time.perf_counter() - begun
            placed = time.perf_counter()
            model = Placement(own.name, copy_threads=copy_threads).shared(warm).model
            if own.name != "cpu":
                torch.cuda.synchronize()
            copied_s = time.perf_counter() - placed
            ids = torch.arange(5, 25, device=own.name)[None]
            with torch.inference_mode():
                first = float(model(input_ids=ids).logits.sum())
            said = {"device": own.name, "problem": own.problem, "device_s": device_s,
                    "copy_threads": copy_threads, "copied_s": copied_s,
                    "first_forward_s": time.perf_counter() - begun}
        except BaseException as error:
            said = {"device": None, "problem": repr(error)}
        print(json.dumps(said), flush=True)
        os._exit(0)
    os.wait()
"""


def boot(**environ: str) -> tuple[dict[str, bool], list[dict[str, object]]]:
    """Return the output of the zygote and its horses."""
    folder = Path(__file__).parents[3] / "configs" / "demo"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ZYGOTE, str(folder)],
        env={**os.environ, **ENVIRONMENT, **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    zygote, *horses = map(json.loads, done.stdout.splitlines())
    return zygote, horses


if __name__ == "__main__":
    zygote, horses = boot()
    is_initialized = zygote["initialized"]
    fact("CUDA is initialized in the zygote", is_initialized, "False", not is_initialized)
    fact("libcuda is mapped in the zygote", zygote["libcuda"], "harmless without initialization")
    wanted = "cuda:0" if HAS_GPU else "cpu"
    for horse in horses:
        is_there = horse["device"] == wanted and horse["problem"] is None
        fact("a horse computes on", [horse["device"], horse["problem"]], wanted, is_there)
        fact("fork to CUDA context, s", horse.get("device_s"), "0.15-0.5 on a GPU")
        copying = f"copy of the weights, {horse.get('copy_threads')} threads, s"
        fact(copying, horse.get("copied_s"), "shorter with threads for a large model")
        fact("fork to first forward pass, s", horse.get("first_forward_s"), "0.5-1.5 on a GPU")
    if HAS_GPU:
        # NVML does not know this name, and torch would ask CUDA.
        zygote, horses = boot(CUDA_VISIBLE_DEVICES="MIG-00000000-0000-0000-0000-000000000000")
        fact(
            "with a MIG name CUDA is initialized",
            zygote["initialized"],
            "False",
            not zygote["initialized"],
        )
        fact("a horse with it falls back", horses[0]["device"], "cpu", horses[0]["device"] == "cpu")
