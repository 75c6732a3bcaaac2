"""The warm set: the models that the zygote holds, and how they get in and out.

Weights stay file mappings wherever the dtype allows: they cost no private memory, and a fork
shares them. Nothing here computes: one parallel operation in the zygote would hang its children.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...configs.config import ModelConfig
from ...configs.units import format_size
from ...jobs.context import WarmModel
from ...jobs.errors import Conflict, JobFailed, NotFound
from ...jobs.models.adapters import merge, model_folder
from ...jobs.models.weight_headers import tensors
from ..host import model_files
from .headers import check_loadable
from .held_files import HeldFiles
from .placement import Placement

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_TARGET_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass
class Loaded:
    """A warm model and what is known of it."""

    config: ModelConfig
    warm: WarmModel
    dtype: str
    num_parameters: int
    size_bytes: int
    seconds: float
    loaded_at: float
    files: str  # fingerprint
    weights: str  # digest
    held: HeldFiles
    is_reloaded: bool = False  # whether it was warm already, from files that have changed since
    used_at: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.config.name,
            "path": self.config.path,
            "dtype": self.dtype,
            "task": self.config.task,
            "precision": self.config.precision,
            "parameters": self.num_parameters,
            "bytes": self.size_bytes,
            "seconds": round(self.seconds, 3),
            "loaded_at": self.loaded_at,
            "weights": self.weights,
        }


class WarmModels:
    """The models in this process, at most `budget_bytes` of them."""

    def __init__(
        self, budget_bytes: int, *, holds_files: bool = False, digests: Path | None = None
    ) -> None:
        """`holds_files`: whether this process handles SIGIO; `digests`: the folder of digests."""
        self.budget_bytes = budget_bytes
        self.loaded: dict[str, Loaded] = {}
        self.conflict: Conflict | None = None  # why a fork cannot use its mapping of the model
        self._holds_files = holds_files
        self._digests = digests

    def ensure(self, config: ModelConfig, folder: Path, *, in_use: Collection[str]) -> Loaded:
        """Return the model, loading it from `folder` if it is not warm, or another one there.

        A model whose files have changed is loaded again; running horses keep the old weights. To
        make room, the least recently used models are unloaded, never one `in_use`. Raises JobFailed
        with the sizes if it cannot fit, or if the folder holds no model; Conflict if a model of
        that name is in use with other settings, or if its files are being written.
        """
        with blaming(config, folder):
            files = model_files.fingerprint(folder)
        found = self.loaded.get(config.name)
        if found is not None:
            if found.config == config and found.files == files:
                found.used_at = time.time()
                return found
            if found.config != config and config.name in in_use:
                raise Conflict(
                    f"model: {config.name} is in use with other settings: wait, or rename"
                )
            self.unload(config.name)
        begun = time.perf_counter()
        held = HeldFiles(model_files.weights(folder) if self._holds_files else ())
        try:
            loaded = self._load(config, folder, held, in_use)
        except BaseException:
            held.give_back()
            raise
        loaded.seconds = time.perf_counter() - begun
        loaded.is_reloaded = found is not None and found.config == config
        self.loaded[config.name] = loaded
        # A collection in a child would otherwise write to every page that holds an object.
        gc.collect()
        gc.freeze()
        return loaded

    def _load(
        self, config: ModelConfig, folder: Path, held: HeldFiles, in_use: Collection[str]
    ) -> Loaded:
        with blaming(config, folder):
            files = model_files.fingerprint(folder)
            weights = model_files.digest(folder, self._digests)
            check_loadable(model_folder(folder))
            needed = stored_bytes(model_folder(folder), config.dtype)
        self._make_room(config, needed, in_use)
        with blaming(config, folder):
            warm = read(config, folder, may_pack=self._has_room_twice(needed))
            warm = replace(warm, weights=weights)
            if model_files.fingerprint(folder) != files:
                raise ValueError("its files were changed while they were read: try again")
        tensors_of = [*warm.model.parameters(), *warm.model.buffers()]
        return Loaded(
            config=config,
            warm=warm,
            dtype=str(warm.model.dtype).removeprefix("torch."),
            num_parameters=sum(p.numel() for p in warm.model.parameters()),
            size_bytes=sum(t.numel() * t.element_size() for t in tensors_of),
            seconds=0.0,
            loaded_at=time.time(),
            files=files,
            weights=weights,
            held=held,
        )

    def hold_in_fork(self, name: str | None) -> None:
        """Hold the files of one model for this process, a fork, and no others.

        If they were written since the fork, the job that takes the model gets an error.
        """
        for loaded in self.loaded.values():
            if loaded.config.name != name:
                loaded.held.close()
        try:
            if name is not None:
                self.loaded[name].held.renew()
        except Conflict as error:
            self.conflict = error

    def keep_as_mapped(self) -> None:
        """Copy the mappings of files that another process waits to write. Raises MemoryError."""
        for loaded in self.loaded.values():
            loaded.held.copy_wanted()

    def unload(self, name: str) -> None:
        """Unload a model. Horses that run with it keep their own mapping. Raises NotFound."""
        unloaded = self.loaded.pop(name, None)
        if unloaded is None:
            raise NotFound(
                f"model: {name!r} is not warm; warm are: {', '.join(self.loaded) or '-'}"
            )
        unloaded.held.give_back()
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def _has_room_twice(self, needed: int) -> bool:
        """Whether the budget has room for a model and for a packed copy, which a horse may make."""
        held = sum(model.size_bytes * (1 + model.warm.may_pack) for model in self.loaded.values())
        return held + 2 * needed <= self.budget_bytes

    def _make_room(self, config: ModelConfig, needed: int, in_use: Collection[str]) -> None:
        held = sum(model.size_bytes for model in self.loaded.values())
        idle = sorted(
            (m for name, m in self.loaded.items() if name not in in_use), key=lambda m: m.used_at
        )
        freeable = sum(model.size_bytes for model in idle)
        if held - freeable + needed > self.budget_bytes:
            raise JobFailed(
                f"model: {config.name} needs {format_size(needed)}, but of the memory budget of "
                f"{format_size(self.budget_bytes)} only "
                f"{format_size(self.budget_bytes - held + freeable)} can "
                "be freed: raise memory_budget, unload a model, or choose a smaller dtype"
            )
        for model in idle:
            if held + needed <= self.budget_bytes:
                return
            self.unload(model.config.name)
            held -= model.size_bytes


class HorseModels:
    """The warm models as a job sees them (jobs.context.Models); lives in the horse.

    `copies`: whether the job is given a copy of its own: a training, in a horse that serves others.
    A horse that is a job's alone changes its own pages anyway, and all other kinds only read: they
    share a model, and with it what was made of it once, as the engine that answers.
    `placement`: the horse's device, on which the models are handed out.
    """

    def __init__(
        self, warm: WarmModels, names: dict[str, str], *, copies: bool, placement: Placement
    ) -> None:
        """`names`: what the job's spec calls a model (perhaps a folder) -> its warm name."""
        self._warm = warm
        self._names = names
        self._copies = copies
        self.placement = placement

    def take(self, name: str) -> WarmModel:
        loaded = self._warm.loaded.get(self._names.get(name, name))
        if loaded is None:
            raise NotFound(f"model: {name!r} is not warm")
        if self._warm.conflict is not None:
            raise self._warm.conflict
        place = self.placement.copied if self._copies else self.placement.shared
        return place(loaded.warm)

    def weights(self, precision: str | None) -> dict[str, str] | None:
        """The job's warm model: its folder, the digest of its files, and the precision of answers.

        `precision`: the one that the job asks for, None for the model's.
        """
        for name in self._names.values():
            loaded = self._warm.loaded[name]
            return {
                "folder": str(loaded.warm.path),
                "digest": loaded.weights,
                "precision": precision or loaded.config.precision,
            }
        return None

    def num_parameters(self) -> int | None:
        """The parameters of the job's warm model, None when it makes one of its own."""
        sizes = [self._warm.loaded[name].num_parameters for name in self._names.values()]
        return sum(sizes) if sizes else None


def stored_bytes(folder: Path, dtype: str) -> int:
    """The memory that a model folder's weights take in a dtype, from the files' headers alone."""
    total = 0
    for _, tensor in tensors(folder):
        target_bytes = _TARGET_BYTES.get(dtype, _DTYPE_BYTES.get(tensor["dtype"], 4))
        total += math.prod(tensor["shape"]) * target_bytes
    return total


@contextmanager
def blaming(config: ModelConfig, folder: Path) -> Iterator[None]:
    """Turn whatever the reading of a model's files raises into JobFailed."""
    try:
        yield
    except Exception as error:  # damaged files raise anything, and must not end the zygote
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise JobFailed(f"model: {config.name} cannot be loaded from {folder}: {reason}") from error


def read(config: ModelConfig, folder: Path, *, may_pack: bool) -> WarmModel:
    """Return the model in a folder; that of an adapter is merged. Raises what libraries raise."""
    import torch
    import transformers

    from ...jobs.codegraph.encoder import CodeGraphConfig  # makes it known to the Auto classes

    base = model_folder(folder)
    settings = transformers.AutoConfig.from_pretrained(base)
    has_masked_lm = isinstance(settings, CodeGraphConfig)
    name = _auto_class(config.task, settings.architectures or [], has_masked_lm=has_masked_lm)
    auto = getattr(transformers, name)
    dtype = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    model = auto.from_pretrained(base, config=settings, dtype=dtype)
    if base != folder:
        model = merge(model, folder)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder if has_tokenizer else base)
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
