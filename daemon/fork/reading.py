"""Reading a model from its folder: its size in memory, its class, and its errors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...configs.config import ModelConfig
from ...jobs.context import WarmModel
from ...jobs.errors import JobFailed
from ...jobs.models.adapters import merged, model_folder
from ...jobs.models.weight_headers import tensors
from .adapters import NotServedUnmerged

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_TARGET_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def stored_bytes(folder: Path, dtype: str) -> int:
    """The memory that a model folder's weights take in a dtype, from the files' headers alone.

    Pickled weights have no header: the size of their files counts, whatever their dtype.
    """
    total = 0
    for _, tensor in tensors(folder):
        target_bytes = _TARGET_BYTES.get(dtype, _DTYPE_BYTES.get(tensor["dtype"], 4))
        total += math.prod(tensor["shape"]) * target_bytes
    return total or sum(path.stat().st_size for path in folder.glob("pytorch_model*.bin"))


@contextmanager
def blaming(config: ModelConfig, folder: Path) -> Iterator[None]:
    """Turn any exception from reading a model's files into JobFailed, except NotServedUnmerged."""
    try:
        yield
    except NotServedUnmerged:
        raise
    except Exception as error:  # damaged files raise anything, and must not end the zygote
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise JobFailed(f"model: {config.name} cannot be loaded from {folder}: {reason}") from error


def read(config: ModelConfig, folder: Path, *, may_pack: bool) -> WarmModel:
    """Return the model in a folder; that of an adapter is merged. Raises what libraries raise."""
    import torch
    import transformers

    from ...jobs.codegraph.encoder import CodeGraphConfig  # registers it with the Auto classes

    base = model_folder(folder)
    settings = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
    has_masked_lm = isinstance(settings, CodeGraphConfig)
    name = _auto_class(config.task, settings.architectures or [], has_masked_lm=has_masked_lm)
    auto = getattr(transformers, name)
    dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    model = auto.from_pretrained(base, config=settings, dtype=dtype, trust_remote_code=False)
    if base != folder:
        model = merged(model, folder)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder if has_tokenizer else base, trust_remote_code=False
    )
    return WarmModel(
        name=config.name,
        path=folder,
        model=model.eval(),
        tokenizer=tokenizer,
        precision=config.precision,
        may_pack=may_pack,
    )


def _auto_class(task: str, architectures: list[str], *, has_masked_lm: bool) -> str:
    by_task = {
        "causal-lm": "AutoModelForCausalLM",
        "masked-lm": "AutoModelForMaskedLM",
        "image-text-to-text": "AutoModelForImageTextToText",
        "embedding": "AutoModel",
    }
    if task != "auto":
        return by_task[task]
    name = architectures[0] if architectures else ""
    if has_masked_lm or name.endswith("ForMaskedLM"):
        return by_task["masked-lm"]
    if name.endswith("ForConditionalGeneration"):
        return by_task["image-text-to-text"]
    if name.endswith("Model") and not name.endswith("LMHeadModel"):
        return by_task["embedding"]  # saved without a head
    return by_task["causal-lm"]
