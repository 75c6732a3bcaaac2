"""The content of a training checkpoint, and how it is written.

The files are those of the Trainer of transformers (`from_pretrained` loads them, a plain Trainer
resumes from them) and one of warmd, `job_state.pt`. Imports torch: only `run` of a kind imports it.
"""

from __future__ import annotations

import io
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import modeling_utils
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals

from ..context import MANIFEST, Staging
from ..data.trained_prompt import TrainedPrompt
from ..errors import JobFailed
from ..models.adapters import WEIGHTS
from .device_copies import HostReader, held, on_host
from .live_tensors import LiveSink, LiveTensors
from .lora import adapter_metadata, adapter_tensors, write_adapter_config

JOB_STATE = "job_state.pt"  # state that the Trainer's own files lack
RNG_STATE = "rng_state.pth"
STATE_FILES = (OPTIMIZER_NAME, SCHEDULER_NAME, RNG_STATE, JOB_STATE, TRAINER_STATE_NAME)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All state that the next step depends on.

    CPU tensors are shared with the training, which calls `live.release` before it changes them. GPU
    tensors are copies, on the device if it has room, read when they are written.
    """

    model: Any  # transformers.PreTrainedModel
    tokenizer: TokenizerFiles
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    rng: dict[str, Any]
    job: dict[str, Any]
    trainer: Any  # transformers.TrainerState
    live: LiveTensors

    @classmethod
    def take(
        cls,
        *,
        model: Any,
        tokenizer: TokenizerFiles,
        optimizer: Any,
        scheduler: Any,
        job: dict[str, Any],
        trainer: Any,
    ) -> Snapshot:
        """Capture the state; GPU tensors and small state are copied."""
        state = held(optimizer.state_dict())
        trained = (weight for weight in model.parameters() if weight.requires_grad)
        weights = [*trained, *model.buffers()]
        # Copies of GPU tensors need no watching: training never changes them.
        tensors = [t for t in (*weights, *tree_leaves(state)) if isinstance(t, Tensor)]
        return cls(
            model=model,
            tokenizer=tokenizer,
            optimizer=state,
            scheduler=scheduler.state_dict(),
            rng=rng_state(),
            job=on_cpu(job),
            trainer=trainer,
            live=LiveTensors(tensor for tensor in tensors if tensor.device.type == "cpu"),
        )

    def prepare(self, staging: Staging) -> Callable[[], None]:
        """Write small files; return a function that writes the rest (Checkpoints.save)."""
        try:
            weights = _write_all_but_weights(self.model, staging.path)
            self.tokenizer.write(staging.path)
            _save(self.scheduler, staging.path / SCHEDULER_NAME)
            _save(self.rng, staging.path / RNG_STATE)
            _save(self.job, staging.path / JOB_STATE)
            self.trainer.save_to_json(str(staging.path / TRAINER_STATE_NAME))
        except BaseException:
            self.live.end()
            raise

        # Created after the last copy: the reader waits for the work queued up to here.
        reader = None if self.model.device.type == "cpu" else HostReader(self.model.device)
        written = [tensor for _, tensors, _ in weights for tensor in tensors.values()]
        promised = self.live.watched_bytes((*written, *_storages(self.optimizer)))

        def write() -> None:
            try:
                for name, tensors, metadata in weights:
                    with staging.open(name) as file:
                        read = on_host(tensors, reader)
                        write_safetensors(self.live.sink(file), read, metadata)
                with staging.open(OPTIMIZER_NAME) as file:
                    # The manifest has a checksum of the file, so none per tensor is needed.
                    torch.serialization.set_crc32_options(False)
                    state = on_host(self.optimizer, reader)
                    torch.save(state, self.live.sink(file))  # type: ignore[arg-type]
                self.live.check_read(promised)
            finally:
                self.live.end()

        return write


def _storages(state: Any) -> list[Tensor]:
    """Return the storages of the CPU tensors in a state as byte tensors, each once."""
    leaves = (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
    tensors = [tensor for tensor in leaves if tensor.device.type == "cpu"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]


def _save(state: dict[str, Any], path: Path) -> None:
    # Through memory: on a full disk torch raises a RuntimeError instead of an OSError.
    content = io.BytesIO()
    torch.save(state, content)
    path.write_bytes(content.getbuffer())


class TokenizerFiles:
    """The files of a tokenizer, cached: they are slow to make and equal in every checkpoint.

    `prompt`: how the training writes prompts, in a file next to them.
    """

    def __init__(self, tokenizer: Any | None, prompt: TrainedPrompt | None = None) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._files: dict[Path, bytes] | None = None  # by their place in the folder

    def write(self, folder: Path) -> None:
        """Write the files into a folder."""
        if self._prompt is not None:
            self._prompt.write(folder)
        if self._tokenizer is None:
            return
        if self._files is None:
            paths = map(Path, self._tokenizer.save_pretrained(folder))
            self._files = {p.relative_to(folder): p.read_bytes() for p in paths if p.is_file()}
        else:
            for name, content in self._files.items():
                (folder / name).parent.mkdir(exist_ok=True)  # chat templates with names have one
                (folder / name).write_bytes(content)


def _write_all_but_weights(
    model: Any, folder: Path
) -> list[tuple[str, dict[str, Tensor], dict[str, str]]]:
    """Write a model without its weights; return the weights by file name.

    transformers decides about tied weights, names on disk and sharding. Of a PeftModel only the
    adapter is written.
    """
    if isinstance(model, PeftModel):
        write_adapter_config(model, folder)
        return [(WEIGHTS, on_cpu(adapter_tensors(model)), adapter_metadata(model))]
    found: list[tuple[str, dict[str, Tensor], dict[str, str]]] = []

    def keep(tensors: dict[str, Tensor], path: str, metadata: dict[str, str] | None = None) -> None:
        found.append((Path(path).name, held(tensors), metadata or {}))

    library = cast(Any, modeling_utils)
    writes, library.safe_save_file = library.safe_save_file, keep
    try:
        model.save_pretrained(folder)
    finally:
        library.safe_save_file = writes
    return found


def write_model(model: Any, folder: Path) -> None:
    """Write a model, or the adapter of a PeftModel, to `folder`."""
    if isinstance(model, PeftModel):
        write_adapter_config(model, folder)
        save_file(adapter_tensors(model), folder / WEIGHTS, adapter_metadata(model))
    else:
        model.save_pretrained(folder)


def write_safetensors(sink: LiveSink, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write contiguous CPU tensors in the safetensors format.

    https://huggingface.co/docs/safetensors: header length (8 bytes, little-endian), JSON header,
    data without gaps; the widest dtype first, so that all tensors are aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype = _DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        sink.write(tensor.detach().reshape(-1).view(torch.uint8).numpy())


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def rng_state() -> dict[str, Any]:
    """Return the state of every global generator, as the Trainer of transformers reads it."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.random.get_rng_state()
    return state


def on_cpu(state: Any) -> Any:
    """Return the state with GPU tensors copied to the CPU; CPU tensors are not copied."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, state)


def require_files(checkpoint: Path) -> None:
    """Raise JobFailed if a state file is missing: the Trainer would reset that state."""
    for name in STATE_FILES:
        if not (checkpoint / name).is_file():
            raise JobFailed(f"{checkpoint.name}: {name} is missing, and nothing can replace it")


def read_job_state(checkpoint: Path) -> dict[str, Any]:
    """Return the `Snapshot.job` of a checkpoint."""
    state: dict[str, Any] = torch.load(
        checkpoint / JOB_STATE, map_location="cpu", weights_only=True
    )
    return state


def load_optimizer(optimizer: Any, checkpoint: Path) -> None:
    """Load the state of the optimizer."""
    path = checkpoint / OPTIMIZER_NAME
    optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def restore_rng(checkpoint: Path) -> None:
    """Set every global generator to its state in a checkpoint."""
    with safe_globals():
        state = torch.load(checkpoint / RNG_STATE, weights_only=True)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.random.set_rng_state(state["cuda"])


def link_model(checkpoint: Path, folder: Path) -> bool:
    """Hard-link the model files of `checkpoint` into `folder`; return False if impossible."""
    try:
        for file in checkpoint.rglob("*"):
            if file.is_file() and file.name not in (*STATE_FILES, MANIFEST):
                target = folder / file.relative_to(checkpoint)
                target.parent.mkdir(exist_ok=True)
                os.link(file, target)
    except OSError:  # a file system without links
        for file in folder.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        return False
    return True
