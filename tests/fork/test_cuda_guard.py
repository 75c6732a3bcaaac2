"""The zygote never initializes CUDA; tested with a simulated CUDA build of torch.

CUDA itself is not tested here: `tests/gpu/check.py` does so on a machine with a GPU.
"""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from cuda_children import child

from warmd.daemon.fork.headers import check_loadable

BOOT = """
import sys
import fake_cuda, torch
from warmd.daemon.fork import libraries
libraries.import_libraries()
from pathlib import Path
from warmd.configs.config import ModelConfig
from warmd.daemon.fork.models import WarmModels
models, folder = WarmModels(10**9), Path(sys.argv[1])
models.ensure(ModelConfig(name="tiny", path=str(folder)), folder, in_use=())
print(fake_cuda.TOUCHED, torch.cuda.is_available(), "bitsandbytes" in sys.modules)
"""

CALL = """
import importlib.util, sys
import fake_cuda, torch
from warmd.daemon.fork import cuda_guard
sys.path.insert(0, sys.argv[1])
cuda_guard.forbid_cuda()
print(importlib.util.find_spec("bitsandbytes"))
for call in (torch.cuda.get_device_capability, lambda: torch.cuda.mem_get_info()):
    try:
        call()
    except RuntimeError as error:
        print(error)
print(fake_cuda.TOUCHED)
cuda_guard.allow_cuda()
print(importlib.util.find_spec("bitsandbytes").name)
try:
    torch.cuda.init()
except RuntimeError as error:
    print(error)
print(fake_cuda.TOUCHED)
"""


@pytest.mark.parametrize(
    "num_gpus",
    [
        1,
        pytest.param(
            -1,
            marks=pytest.mark.nightly(
                part="levels", catches="a zygote that asks CUDA for a GPU that NVML does not know"
            ),
        ),
    ],
)
def test_a_zygote_boots_and_loads_models_without_initializing_cuda(tiny_model, num_gpus):
    # -1: NVML does not know the GPU, as with a MIG instance.
    [found] = child(BOOT, str(tiny_model), FAKE_GPUS=str(num_gpus))
    assert found == f"[] {num_gpus == 1} True"


@pytest.mark.slow
def test_calls_that_would_initialize_cuda_are_refused_by_name_until_the_fork(tmp_path):
    # It asks CUDA for each GPU when it is imported, and peft imports it.
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text("import torch; torch.cuda.get_device_capability()")
    before, *refused, touched, found, error, after = child(CALL, str(tmp_path))
    assert (before, found) == ("None", "bitsandbytes")
    assert touched == "[]"
    assert len(refused) == 2
    for line in refused:
        assert line.startswith("<string>:")
        assert line.endswith("initializes CUDA in the zygote, which no job would survive")
    assert error.startswith("CUDA driver version is insufficient")
    assert after == "['_cuda_init']"


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "bitsandbytes"])
def test_a_model_with_quantized_weights_is_refused_before_its_loader_looks_for_a_gpu(
    tiny_model, tmp_path, method
):
    config: dict[str, Any] = json.loads((tiny_model / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    with pytest.raises(ValueError, match="its weights are quantized: must be float32, bfloat16"):
        check_loadable(tmp_path)
