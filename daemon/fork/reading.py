"""Reading a model from its folder: its size in memory, its class, and its errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...configs.config import ModelConfig
from ...jobs.context import WarmModel
from ...jobs.errors import JobFailed
from ...jobs.models import response_templates
from ...jobs.models.adapters import merged, model_folder
from ...jobs.models.folder_files import naming
from ...jobs.models.generation_settings import unapplied
from ...jobs.models.pretrained import load
from ...jobs.models.pretrained_tokenizer import appended_end, read_tokenizer
from ...jobs.models.vocabulary import Vocabulary
from ...jobs.models.weight_headers import tensors
from ...jobs.user_code import limited_processes
from .adapters import NotServedUnmerged

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
# An error of the classes of transformers about one field.
_FIELD = re.compile(r"Field '(\w+)' expected (\w+), got \w+ \(value: (.*?)\)")
_PANIC = "PanicException"  # of libraries in Rust: a BaseException without a public class
_GENERATING = ("causal-lm", "image-text-to-text")  # tasks of models that complete prompts
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
    except BaseException as error:  # damaged files raise anything, and must not end the zygote
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise JobFailed(f"model: {config.name} cannot be loaded from {folder}: {reason}") from error


def read(config: ModelConfig, folder: Path, *, may_pack: bool) -> WarmModel:
    """Return the model in a folder; that of an adapter is merged.

    Raises ValueError if the weights do not fit the model, and what libraries raise.
    """
    import torch
    import transformers

    from ...jobs.codegraph.encoder import CodeGraphConfig  # registers it with the Auto classes

    template = read_template(config)
    base = model_folder(folder)
    with _naming_field():
        settings = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
    has_masked_lm = isinstance(settings, CodeGraphConfig)
    task = _task(config.task, settings.architectures or [], has_masked_lm=has_masked_lm)
    dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    loaded = load(task, base, config=settings, dtype=dtype)
    model = loaded.model if base == folder else merged(loaded.model, folder)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = read_tokenizer(folder if has_tokenizer else base)
    end = appended_end(tokenizer) if task in _GENERATING else None
    limited_processes.end_idle()  # one that tried the tokenizer's rules: this process forks
    return WarmModel(
        name=config.name,
        path=folder,
        model=model.eval(),
        tokenizer=tokenizer,
        precision=config.precision,
        may_pack=may_pack,
        new_head=loaded.new_head,
        left_out=loaded.left_out,
        unembedded=tuple(Vocabulary.of(config.name, model, tokenizer).beyond(tokenizer)),
        appended_end=end,
        unapplied=unapplied(model.generation_config) if task in _GENERATING else {},
        response_template=template,
    )


def read_template(config: ModelConfig) -> dict[str, Any] | None:
    """Return the response template that a model is given. Raises ValueError with file and field."""
    if config.response_template is None:
        return None
    return response_templates.read(Path(config.response_template))


@contextmanager
def _naming_field() -> Iterator[None]:
    """Raise ValueError with the field of a config.json that the class of the model refuses."""
    try:
        with naming("config.json: must be settings that transformers takes"):
            yield
    except ValueError as error:
        found = _FIELD.search(" ".join(str(error.__cause__).split()))
        if found is None:
            raise
        name, takes, value = found.groups()
        raise ValueError(f"config.json: {name} must be {takes}, got {value[:60]}") from error


def _task(task: str, architectures: list[str], *, has_masked_lm: bool) -> str:
    if task != "auto":
        return task
    name = architectures[0] if architectures else ""
    if has_masked_lm or name.endswith("ForMaskedLM"):
        return "masked-lm"
    if name.endswith("ForConditionalGeneration"):
        return "image-text-to-text"
    if name.endswith("ForSequenceClassification"):
        return "sequence-classification"
    if name.endswith("Model") and not name.endswith("LMHeadModel"):
        return "embedding"  # saved without a head
    return "causal-lm"
