"""The libraries that a job needs, imported once for all jobs, before any fork.

Imports torch and transformers in functions only: the environment must be set before.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from ...jobs import KINDS, import_all
from .cuda_guard import forbid_cuda

log = logging.getLogger(__name__)

# Read by the libraries when they are imported.
ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # count GPUs by NVML, which needs no CUDA
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # GPU 0 is the same one for NVML, nvidia-smi and CUDA
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch's deterministic algorithms require it
    "TOKENIZERS_PARALLELISM": "false",  # a thread pool would hang in a forked child
    "OPENBLAS_NUM_THREADS": "1",
    # If OpenMP starts fewer threads than torch requests, oneDNN's GEMM leaves rows of the result
    # uninitialized.
    "OMP_DYNAMIC": "false",
    "OMP_THREAD_LIMIT": "4294967295",  # none
    # Threads spin 0.15 ms at a barrier instead of 7.5 ms, then sleep: with other programs running,
    # spinning may take the core that the thread waited for needs.
    "GOMP_SPINCOUNT": "5000",
    "HF_HUB_OFFLINE": "1",  # weights are downloaded by other processes
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}

# Imported by jobs inside functions, because the modules that contain them are also imported without
# torch.
_FIRST_USED_BY_JOBS = (
    "...jobs.training.arguments",
    "...jobs.training.gloo_group",
    "...jobs.training.local_group",
    "torch.utils.serialization.config",  # by the first checkpoint
)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during imports, whose objects all stay: saves 8 % of the time."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@_no_garbage_collection()
def import_libraries(on_import: Callable[[str], None] = lambda name: None) -> None:
    """Import everything that a job needs, so that horses import nothing. Leaves one thread running.

    `on_import` is called with the name of each library before it is imported.
    """
    on_import("torch")
    import torch

    from ...jobs.compute.threads import renew_pool_after_forks

    forbid_cuda()
    torch.set_num_threads(1)  # before the first operation: see pause_openmp
    renew_pool_after_forks()
    on_import("transformers")
    import tqdm
    import transformers

    tqdm.tqdm.monitor_interval = 0  # otherwise the first progress bar starts a thread
    transformers.utils.logging.disable_progress_bar()
    for name in (
        "AutoConfig",
        "AutoModelForCausalLM",
        "AutoTokenizer",
        "Trainer",
        "LlamaForCausalLM",
    ):
        getattr(transformers, name)
    for kind in KINDS:
        on_import(kind)
        import_kind(kind)
    with torch.profiler.record_function("first"):  # imports a module that a first step would import
        pass
    from ...jobs.compute import native
    from ...jobs.compute.levels import levels
    from ...jobs.libraries import versions
    from ...jobs.user_code.modules import library_folders

    on_import("kernels")
    levels()  # measured once per machine, with one thread, and not in each horse
    for name in _FIRST_USED_BY_JOBS:
        import_module(name, __package__)
    if native.is_available():
        import_module("...jobs.engine.native_layer_ops", __package__)  # loads machine code
    versions()
    library_folders()
    torch.cuda.is_available()  # by NVML, see ENVIRONMENT; only the first call is slow


def import_kind(kind: str) -> None:
    """Import the modules of a kind; log a failure of a kind from another package."""
    try:
        import_all(kind)
    except (Exception, SystemExit) as error:  # its modules are code: they raise anything
        if kind not in KINDS.outside:
            raise
        log.warning(
            "zygote: kind %s: its jobs will fail: %s: %s", kind, type(error).__name__, error
        )


def pause_openmp() -> None:
    """Make libgomp end its thread pool: a forked child would wait for its threads forever.

    A second line of defense: the zygote never computes, so libgomp has no threads.
    """
    global _gomp
    if sys.platform != "linux":
        return  # no libgomp there
    if _gomp is None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split()[-1] for line in maps if "libgomp" in line}
        _gomp = [ctypes.CDLL(path) for path in paths]
    for library in _gomp:
        library.omp_pause_resource_all(1)


_gomp: list[ctypes.CDLL] | None = None
