"""PEFT adapters: folders that name a base model and modify some of its weights.

Plain LoRA is served unmerged by the engine (engine/low_rank.py), next to its base. All other types
are merged into a copy of the weights that they change. Types that cannot be merged (prompt tuning,
…) are refused by name.
"""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

from ...configs.entries import HUB_ID
from .folder_checks import check_folder
from .folder_files import read_json
from .weight_headers import header, listed

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# The PEFT types that are equal after merging and read no files outside of the folder.
MERGED = (
    "ADALORA", "BOFT", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS",
    "OFT", "TRAINABLE_TOKENS", "VERA",
)  # fmt: skip
# LoRA that begins from a part of the base's weights, which the base has lost then: such an adapter
# fits the base only when it is saved with path_initial_model_for_weight_conversion.
_SPLITS_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
# LoRA settings that are refused: a change from a token on only; new layers; a module that is
# imported by a name in the file.
_REFUSED = ("alora_invocation_tokens", "layer_replication", "megatron_config")
_UNSET: tuple[Any, ...] = (None, False, "none", [], {})
# LoRA settings that keep it a low-rank product per linear layer, whatever their values.
_PLAIN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules",
    "task_type", "use_rslora",
}  # fmt: skip
# In the metadata of the weights: the digest of the base's weights that the adapter was trained on.
BASE_DIGEST = "warmd_base_weights"
BASE_PRECISION = "warmd_base_precision"  # precision of the base during the training of the adapter

_BASE = f"{CONFIG}: base_model_name_or_path must be a model's folder or hub id"  # begins messages


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter; False when it cannot be read."""
    return os.path.isfile(folder / CONFIG)


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model or an adapter; False when it cannot be read."""
    return os.path.isfile(folder / "config.json") or is_adapter(folder)


def base_of(folder: Path) -> str:
    """Return the adapter's base: the absolute path of a folder, or an id on the hub.

    An id is followed by @ and the revision where the adapter names one. PEFT saves a relative path
    as it was given to the training, so it may count from the adapter's folder or from any folder
    above: the nearest that has such a model. Raises ValueError if it names neither.
    """
    if (folder / "config.json").is_file():
        raise ValueError(
            f"it has a model's config.json and {CONFIG}: only one of them can be meant"
        )
    settings = _settings(folder)
    named = settings.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ValueError(f"{_BASE}, got {named!r}")
    path = os.path.expanduser(named)  # unchanged for a user that does not exist
    absolute = Path(os.path.abspath(folder))
    for above in (absolute, *absolute.parents):  # an absolute path is the same from each
        if (above / path / "config.json").is_file():
            return str((above / path).resolve())
    if not HUB_ID.fullmatch(named):
        places = (
            "" if os.path.isabs(path) else ", seen from the adapter's folder and those above it"
        )
        raise ValueError(f"{_BASE}, got {named!r}: no model folder there{places}")
    revision = settings.get("revision") or ""
    if not isinstance(revision, str) or not revision.isprintable():
        raise ValueError(
            f"{CONFIG}: revision must be the name of a branch, tag or commit, got {revision!r}"
        )
    return f"{named}@{revision}" if revision else named


def unwrapped(model: Any) -> Any:
    """Return the model of transformers in a PeftModel; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def model_folder(folder: Path) -> Path:
    """Return the folder of the model that is to be built: an adapter's base, or `folder` itself.

    Raises ValueError when the base is not on this disk.
    """
    if not is_adapter(folder):
        return folder
    base = base_of(folder)
    if Path(base).is_absolute():
        return Path(base)
    try:
        return cached(base)
    except LookupError as error:
        raise ValueError(f"{_BASE}, got {base!r}: no model folder there, and {error}") from error


def check_files(folder: Path) -> None:
    """Raise ValueError for an adapter that cannot be served, by its settings and file headers."""
    check_folder(folder)
    settings = _settings(folder)
    _check(settings)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"it has no {WEIGHTS}: other formats may hold code, and are not read")
    _check_ranks(settings, folder)


def check_base(folder: Path, digest: str) -> None:
    """Raise ValueError if an adapter records another base; `digest`: of the base's weights.

    Only the adapters that warmd has trained record one.
    """
    recorded = _metadata(folder).get(BASE_DIGEST)
    if recorded is not None and recorded != digest:
        raise ValueError(
            f"it was trained on a base whose weights have the digest {recorded}, but those of "
            f"{model_folder(folder)} have {digest}: restore that base, or train again"
        )


def why_not_plain(folder: Path) -> str | None:
    """Return why an adapter is more than low-rank products of linear layers; None: it is not."""
    settings = _settings(folder)
    if settings.get("peft_type") != "LORA":
        return f"peft_type {settings.get('peft_type')}"
    return next((name for name in settings if name not in _PLAIN | _unset(settings)), None)


def rank_of(folder: Path) -> int | None:
    """Return the rank in an adapter's settings; None for a type that has none."""
    rank = _settings(folder).get("r")
    return rank if isinstance(rank, int) else None


def attached(model: Any, folder: Path) -> Any:
    """Return a PeftModel of a model and an adapter; the model and its weights stay as they are.

    The PeftModel has modules of its own, the weights of the model, and those of the adapter mapped
    from its file. Raises ValueError for an adapter that does not fit this model; PEFT raises other
    errors for damaged files.
    """
    import peft

    check_files(folder)
    settings = _settings(folder)
    with warnings.catch_warnings():
        # Warnings about training, untied layers, and problems that are checked below.
        warnings.simplefilter("ignore")
        config = peft.PeftConfig.from_pretrained(str(folder))
        unknown = settings.keys() - config.to_dict().keys()
        for name in sorted(unknown):
            if settings[name] not in _UNSET:
                raise ValueError(
                    f"{CONFIG}: {name} must be absent, as peft {peft.__version__} does not know it"
                )
        # low_cpu_mem_usage: no initialization, as all weights are read next.
        wrapped = peft.PeftModel(_with_own_modules(model), config, low_cpu_mem_usage=True)
        found = _load(wrapped, folder)
        for names, problem in (
            (found.unexpected_keys, f"{WEIGHTS} has {{}}: the model has no place for it"),
            (found.missing_keys, f"{WEIGHTS} has no {{}}, which {CONFIG} names"),
        ):
            if names:
                shown = listed(name.replace(".default", "") for name in names)
                raise ValueError(problem.format(shown))
    return wrapped


def merged(model: Any, folder: Path) -> Any:
    """Return a model with an adapter merged; the model and its weights stay as they are.

    Both share the weights that the adapter does not change. Raises as `attached` does.
    """
    wrapped = attached(model, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        # "safe": in new tensors, as the old ones are mapped from the base's file, and with a check
        # that all are finite.
        whole = wrapped.merge_and_unload(safe_merge=True)
    return whole.requires_grad_(True)  # as any model that was read


def _with_own_modules(model: Any) -> Any:
    """Return a copy of a model with shared weights, in which PEFT can replace and freeze parts."""
    import torch

    shared: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for weight in model.parameters():
        shared[id(weight)] = torch.nn.Parameter(weight.detach(), weight.requires_grad)
    return copy.deepcopy(model, shared)


def _load(wrapped: Any, folder: Path) -> Any:
    """Load the adapter's tensors; return the names of unexpected and of missing ones."""
    try:
        return wrapped.load_adapter(
            str(folder), "default", torch_device="cpu", low_cpu_mem_usage=True
        )
    except RuntimeError as error:  # torch lists the tensors of wrong shape below a title
        first = str(error).strip().splitlines()[:2][-1].strip().replace(".default", "")
        raise ValueError(f"{WEIGHTS} does not fit the model: {first}") from error


def _unset(settings: dict[str, Any]) -> set[str]:
    return {name for name, value in settings.items() if value in _UNSET}


def _metadata(folder: Path) -> dict[str, str]:
    """Return the metadata in the header of an adapter's weights."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, "pt") as file:
        return dict(file.metadata() or {})


def _settings(folder: Path) -> dict[str, Any]:
    return read_json(folder / CONFIG)


def _check(settings: dict[str, Any]) -> None:
    kind = settings.get("peft_type")
    if kind not in MERGED:
        raise ValueError(
            f"{CONFIG}: peft_type must be one of {', '.join(MERGED)}, which can be merged into "
            f"their base, got {kind}"
        )
    for name in _REFUSED:
        if settings.get(name) not in _UNSET:
            raise ValueError(f"{CONFIG}: {name} must be absent, such an adapter cannot be served")
    begun = settings.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_SPLITS_BASE):
        raise ValueError(
            f"{CONFIG}: init_lora_weights must not be {begun}: save the adapter with "
            "path_initial_model_for_weight_conversion, and it can be served"
        )


def _check_ranks(settings: dict[str, Any], folder: Path) -> None:
    """Raise ValueError for ranks far beyond the tensors: PEFT would allocate their memory."""
    tensors = header(folder / WEIGHTS).values()
    largest = max((extent for tensor in tensors for extent in tensor["shape"]), default=0)
    pattern = settings.get("rank_pattern") or {}
    for rank in (settings.get("r"), settings.get("init_r"), *pattern.values()):
        if isinstance(rank, int) and rank > largest:
            raise ValueError(
                f"{CONFIG}: ranks must be at most {largest}, the largest extent of a tensor in "
                f"{WEIGHTS}, got {rank}"
            )


def cached(named: str) -> Path:
    """The folder in the hub's cache of an id, or id@revision, that was fetched.

    Raises LookupError if it is missing or incomplete.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    model_id, _, revision = named.partition("@")
    try:
        return Path(snapshot_download(model_id, revision=revision or None, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise LookupError("the hub's cache has none of that id") from error
