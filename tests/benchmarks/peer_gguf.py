"""Write a Qwen2 or Llama folder (safetensors) as a GGUF file for llama.cpp. Needs numpy and gguf.

    python tests/benchmarks/peer_gguf.py FOLDER OUT F32|F16|Q8_0

Matrices take the format, vectors stay float32, as llama.cpp's own converter does it. The folder's
byte-level BPE tokenizer goes in too: llama.cpp's server does not start without one.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SUPPORTED = ("llama", "qwen2")
NORMAL, CONTROL, UNUSED = 1, 3, 5  # gguf.TokenType


def write(folder: Path, out: Path, name: str) -> None:
    """Write `out`, by a temporary name. Raises ValueError for what it cannot convert."""
    import gguf  # type: ignore[import-not-found, unused-ignore]

    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    if architecture not in SUPPORTED:
        raise ValueError(f"model_type: must be one of {', '.join(SUPPORTED)}, got {architecture}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    temporary = out.with_suffix(".part")
    writer = gguf.GGUFWriter(temporary, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}  # transformers 5; before, a separate number
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if name == 'F32' else 'MOSTLY'}_{name}"])
    _add_tokenizer(writer, folder, config)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"]
    )
    for key, tensor in _tensors(folder):
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if target is None:
            raise ValueError(f"{key}: no tensor of {architecture} in GGUF has this name")
        if architecture == "llama" and (".q_proj." in key or ".k_proj." in key):
            # llama.cpp rotates neighbors, transformers the two halves of a head.
            groups = heads if ".q_proj." in key else kv_heads
            halves = tensor.reshape(groups, 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        kind = gguf.GGMLQuantizationType[name if tensor.ndim > 1 else "F32"]
        writer.add_tensor(target, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(out)


def _tensors(folder: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Each tensor of the folder in float32; numpy has no bfloat16, so the files are parsed here."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + size)
        for key, value in header.items():
            if key == "__metadata__":
                continue
            raw = data[slice(*value["data_offsets"])]
            if value["dtype"] == "BF16":
                tensor = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                tensor = raw.view({"F32": np.float32, "F16": np.float16}[value["dtype"]])
            yield key, np.ascontiguousarray(tensor.reshape(value["shape"]), dtype=np.float32)


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    if tokenizer["model"]["type"] != "BPE":
        raise ValueError(
            f"tokenizer.json: must be byte-level BPE, got {tokenizer['model']['type']}"
        )
    # The embedding has more rows than the tokenizer has tokens.
    tokens = [f"[PAD{number}]" for number in range(config["vocab_size"])]
    types = [UNUSED] * len(tokens)
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if config["model_type"] == "qwen2" else "llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    ends = config.get("eos_token_id") or 0
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
