"""Writes a model, or an adapter for its base, as a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import SpecError
from ..adapters import CONFIG, WEIGHTS, why_not_plain
from ..folder_files import read_json
from ..tokenizer_folder import TokenizerFolder
from ..weight_headers import IS_DERIVED, weight_files
from .decoders import Array, Decoder
from .tensors import TYPES, Tensor, stored, tensors_in, type_for
from .tokenizers import Vocabulary

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_PREFIX = "base_model.model."  # of the names in an adapter


@dataclass(frozen=True)
class Written:
    """What a file has that its source does not say."""

    size_bytes: int
    notes: tuple[str, ...]  # one line each


def check_installed() -> None:
    """Raise SpecError without the package `gguf`."""
    if find_spec("gguf") is None:
        raise SpecError("gguf", "needs the package gguf: pip install 'warmd[gguf]'")


def check_type(kind: str) -> None:
    """Raise SpecError for an unknown type of weights."""
    if kind not in TYPES:
        raise SpecError("gguf", f"must be one of {', '.join(TYPES)}, got {kind!r}")


def write_model(
    folder: Path,
    target: Path,
    kind: str,
    *,
    name: str,
    on_bytes: Callable[[int], None] | None = None,
) -> Written:
    """Write the model in `folder` to the new file `target`, with weights of type `kind`.

    `name`: in the file's metadata. `on_bytes` is called with the bytes written since its last call.
    Raises SpecError for what llama.cpp would compute differently; then there is no file.
    """
    import gguf  # type: ignore[import-not-found, unused-ignore]

    check_type(kind)
    config = read_json(folder / "config.json")
    decoder = Decoder(config)
    vocabulary = Vocabulary(folder, config["vocab_size"])
    names = _names(decoder)
    sources = [
        (tensor, _named(names, tensor.name, decoder))
        for tensor in tensors_in(weight_files(folder))
        if not IS_DERIVED.search(tensor.name)
        and not (decoder.is_tied and tensor.name == "lm_head.weight")
    ]
    head = _EMBEDDING if decoder.is_tied else _HEAD
    if head not in {target for _, target in sources}:
        raise SpecError("gguf", f"the weights have no {head} (tied: {decoder.is_tied})")
    plan = [(tensor, named, type_for(named, tensor.shape, kind, head)) for tensor, named in sources]
    kept = [tensor.name for tensor, _, type in plan if type == "F16" and kind.startswith("q")]
    writer = gguf.GGUFWriter(target, decoder.architecture)
    writer.add_name(name)
    writer.add_file_type(
        gguf.LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{kind.upper()}"]
    )
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    decoder.write(writer)
    vocabulary.write(writer, _ends(folder, config))
    template = TokenizerFolder(folder).chat_template()
    if template is not None:
        writer.add_chat_template(template.source)
    _write(writer, plan, decoder.converted, decoder.extra_tensors(), on_bytes)
    notes = [*decoder.notes, *vocabulary.notes]
    if kept:
        notes.append(f"kept as F16, as their rows are no multiple of 32: {', '.join(kept)}")
    if kind == "q4_0":
        notes.append(f"{head} is Q8_0: in four bits it would cost most")
    return Written(target.stat().st_size, tuple(notes))


def write_adapter(folder: Path, base: Path, target: Path, kind: str, *, name: str) -> Written:
    """Write the LoRA adapter in `folder` to the new file `target`; `base` is its model's folder.

    Raises SpecError for an adapter that is more than low-rank products, and as `write_model`.
    """
    import gguf  # type: ignore[import-not-found, unused-ignore]

    check_type(kind)
    if kind in ("q8_0", "q4_0"):
        raise SpecError(
            "gguf", f"must be f32, f16 or bf16 for an adapter, got {kind!r}; or --merge"
        )
    if (reason := why_not_plain(folder)) is not None:
        raise SpecError("gguf", f"must be a plain LoRA adapter, got one with {reason}: add --merge")
    settings = read_json(folder / CONFIG)
    if settings.get("alpha_pattern"):
        raise SpecError("gguf", f"{CONFIG}: alpha_pattern must be empty, a file has one alpha")
    if settings.get("fan_in_fan_out"):
        raise SpecError("gguf", f"{CONFIG}: fan_in_fan_out must be false, got true")
    rank, alpha = settings["r"], float(settings["lora_alpha"])
    if settings.get("use_rslora"):
        if settings.get("rank_pattern"):
            raise SpecError("gguf", f"{CONFIG}: use_rslora must not go with rank_pattern")
        alpha *= rank**0.5  # llama.cpp divides by the rank, rsLoRA by its root
    decoder = Decoder(read_json(base / "config.json"))
    names = _names(decoder)
    plan = []
    for tensor in sorted(tensors_in([folder / WEIGHTS]), key=lambda one: one.name):
        module, _, part = tensor.name.removeprefix(_PREFIX).rpartition(".lora_")
        if part not in ("A.weight", "B.weight"):
            raise SpecError("gguf", f"{tensor.name} must be lora_A or lora_B of a linear layer")
        named = f"{_named(names, f'{module}.weight', decoder)}.lora_{part[0].lower()}"
        plan.append((tensor, named, kind.upper()))
    writer = gguf.GGUFWriter(target, decoder.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)

    def converted(name: str, values: Array) -> Array:
        # Its rows are those of the base's weight; the columns of lora_A are not reordered.
        return decoder.converted(name, values) if ".lora_B." in name else values

    _write(writer, plan, converted, {}, None)
    return Written(target.stat().st_size, ())


def _names(decoder: Decoder) -> Any:
    import gguf  # type: ignore[import-not-found, unused-ignore]

    kind = gguf.MODEL_ARCH[decoder.architecture.upper()]
    return gguf.get_tensor_name_map(kind, decoder.layers)


def _named(names: Any, name: str, decoder: Decoder) -> str:
    found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise SpecError("gguf", f"{name}: {decoder.architecture} in llama.cpp has no such tensor")
    return found


def _write(
    writer: Any,
    plan: list[tuple[Tensor, str, str]],
    converted: Callable[[str, Array], Array],
    extra: dict[str, Array],
    on_bytes: Callable[[int], None] | None,
) -> None:
    """Write header and tensors, one tensor at a time in memory."""
    import gguf  # type: ignore[import-not-found, unused-ignore]
    import numpy as np

    for tensor, named, kind in plan:
        raw = gguf.GGMLQuantizationType[kind]
        block, block_bytes = gguf.GGML_QUANT_SIZES[raw]
        num_bytes = int(np.prod(tensor.shape)) // block * block_bytes
        writer.add_tensor_info(named, tensor.shape, np.dtype(np.float32), num_bytes, raw)
    for named, values in extra.items():
        writer.add_tensor_info(named, values.shape, values.dtype, values.nbytes)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, _, kind in plan:
            content = stored(tensor.name, converted(tensor.name, tensor.read()), kind)
            writer.write_tensor_data(content)
            if on_bytes is not None:
                on_bytes(content.nbytes)
        for values in extra.values():
            writer.write_tensor_data(values)
        for file in writer.fout:
            file.flush()
            os.fsync(file.fileno())
    finally:
        writer.close()


def _ends(folder: Path, config: dict[str, Any]) -> list[int]:
    """Return the tokens that end a completion, as generation reads them."""
    found = None
    if (folder / "generation_config.json").is_file():
        found = read_json(folder / "generation_config.json").get("eos_token_id")
    found = config.get("eos_token_id") if found is None else found
    return [] if found is None else found if isinstance(found, list) else [found]
