"""What a checkpoint of a training holds, and how it comes to the disk.

The files are those of the Trainer of transformers, so that `from_pretrained` opens one and a plain
Trainer can resume from it, and one of our own. Imports torch: only `run` of a kind imports it.
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
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers import modeling_utils
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from ..context import MANIFEST, Staging
from ..errors import JobFailed
from .live_tensors import LiveSink, LiveTensors

JOB_STATE = "job_state.pt"  # what the Trainer's own files leave out
RNG_STATE = "rng_state.pth"
STATE_FILES = (OPTIMIZER_NAME, SCHEDULER_NAME, RNG_STATE, JOB_STATE, TRAINER_STATE_NAME)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that the next step depends on, as it is now.

    Tensors on the CPU are the training's own: before it changes them, it has to ask `live`.
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
        """Look at everything; what is on a GPU, and what is small, is copied."""
        state = optimizer.state_dict()
        weights = [*model.parameters(), *model.buffers()]
        # Not the copies of what is on a GPU: those the training never changes.
        tensors = [t for t in (*weights, *tree_leaves(state)) if isinstance(t, Tensor)]
        return cls(
            model=model,
            tokenizer=tokenizer,
            optimizer=on_cpu(state),
            scheduler=scheduler.state_dict(),
            rng=rng_state(),
            job=on_cpu(job),
            trainer=trainer,
            live=LiveTensors(tensor for tensor in tensors if tensor.device.type == "cpu"),
        )

    def prepare(self, staging: Staging) -> Callable[[], None]:
        """Write what is small; return what writes the rest (jobs.context.Checkpoints.save)."""
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

        written = [tensor for _, tensors, _ in weights for tensor in tensors.values()]
        promised = self.live.watched_bytes((*written, *_storages(self.optimizer)))

        def write() -> None:
            try:
                for name, tensors, metadata in weights:
                    with staging.open(name) as file:
                        write_safetensors(self.live.sink(file), tensors, metadata)
                with staging.open(OPTIMIZER_NAME) as file:
                    # The file has a checksum in the manifest; one of every tensor is not needed.
                    torch.serialization.set_crc32_options(False)
                    torch.save(self.optimizer, self.live.sink(file))  # type: ignore[arg-type]
                self.live.check_read(promised)
            finally:
                self.live.end()

        return write


def _storages(state: Any) -> list[Tensor]:
    """Return the memory of the tensors in a state, each once, as torch.save writes it."""
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]


def _save(state: dict[str, Any], path: Path) -> None:
    # By way of memory: on a full disk torch itself raises a RuntimeError about positions.
    content = io.BytesIO()
    torch.save(state, content)
    path.write_bytes(content.getbuffer())


class TokenizerFiles:
    """A tokenizer's files, which are the same in every checkpoint and slow to make."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._files: dict[Path, bytes] | None = None  # by their place in the folder

    def write(self, folder: Path) -> None:
        """Write the files into a folder."""
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
    """Have transformers write a model but for its weights, and return those by their files.

    It knows which are tied, how they are called on disk and when there are several files.
    """
    found: list[tuple[str, dict[str, Tensor], dict[str, str]]] = []

    def keep(tensors: dict[str, Tensor], path: str, metadata: dict[str, str] | None = None) -> None:
        found.append((Path(path).name, on_cpu(tensors), metadata or {}))

    library = cast(Any, modeling_utils)
    writes, library.safe_save_file = library.safe_save_file, keep
    try:
        model.save_pretrained(folder)
    finally:
        library.safe_save_file = writes
    return found


def write_safetensors(sink: LiveSink, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file of contiguous tensors on the CPU.

    The format: https://huggingface.co/docs/safetensors: the length of the header in 8 bytes, the
    header in JSON, the data without gaps; the widest type first, so that all is aligned.
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
    """Return the state with its tensors on the CPU: those of a GPU copied, the others as is."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, state)


def require_files(checkpoint: Path) -> None:
    """Raise JobFailed when a file of the state is missing: a Trainer would begin it afresh."""
    for name in STATE_FILES:
        if not (checkpoint / name).is_file():
            raise JobFailed(f"{checkpoint.name}: {name} is missing, and nothing can stand for it")


def read_job_state(checkpoint: Path) -> dict[str, Any]:
    """Return what `Snapshot.job` was."""
    state: dict[str, Any] = torch.load(
        checkpoint / JOB_STATE, map_location="cpu", weights_only=True
    )
    return state


def link_model(checkpoint: Path, folder: Path) -> bool:
    """Give `folder` the files of the model in `checkpoint`, without a copy; False if it cannot."""
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
