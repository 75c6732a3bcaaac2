"""A tiny model that takes images, made in code, and images to show it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import odd_tokenizers
import tiny
import torch
import transformers
from PIL import Image

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<eos><bos>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}.{% endfor %}"
)
IMAGE = 1  # <bos> stands for an image
# Of chats whose turns end with a token, so that others can follow them.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<bos>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<eos>\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


# Of the vision part of each kind, what is its own: windows of 2 x 2 tokens and attention over all
# in the second block; a grid of 8 x 8 positions, and features of the first block.
VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": {"intermediate_size": 64, "fullatt_block_indexes": [1], "window_size": 56},
    "Qwen3VL": {"intermediate_size": 64, "num_position_embeddings": 64, "patch_size": 14,
                "deepstack_visual_indexes": [0]},
}  # fmt: skip


def make(kind: str = "Qwen2VL", *, vision: Any = None, **sizes: Any) -> Any:
    """A model of random weights, two layers deep; `sizes`: of its text model.

    `vision`: a dict of sizes of its vision model, or None.
    """
    torch.manual_seed(0)
    hidden_size = sizes.get("hidden_size", 32)
    own = dict(VISION[kind])
    if kind == "Qwen2VL":
        own["hidden_size"] = hidden_size
    else:
        own |= {"hidden_size": 32, "out_hidden_size": hidden_size}
    if kind == "Qwen3VL":
        sizes.setdefault("head_dim", 8)
    config = getattr(transformers, f"{kind}Config")(
        text_config={
            "vocab_size": 81,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2],
                                "rope_theta": 10000.0},
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
            "initializer_range": 0.3,
            **sizes,
        },
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "initializer_range": 0.3,
            **own,
            **(vision or {}),
        },
        image_token_id=IMAGE,
        video_token_id=80,
        vision_start_token_id=2,
        vision_end_token_id=79,
    )  # fmt: skip
    model: Any = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model.requires_grad_(False).eval()


def save(folder: Path, model: Any = None) -> tuple[Any, Any]:
    """Write the model with what is needed to use it; return it and its tokenizer."""
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136,
                "max_pixels": 200_000, "patch_size": 14, "temporal_patch_size": 2,
                "merge_size": 2}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    model = model or make()
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def save_chatting(folder: Path, **sizes: Any) -> tuple[Any, Any]:
    """Write a model that writes bytes, and ends its turns; return it and its tokenizer."""
    tokenizer = odd_tokenizers.bytewise()
    tokenizer.add_special_tokens({"eos_token": "<eos>", "bos_token": "<bos>"})
    tokenizer.chat_template = CHAT_TEMPLATE
    model = make(vocab_size=len(tokenizer), **sizes)
    model.config.image_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    save(folder, model)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 255, (height, width, 3), generator=pixels, dtype=torch.uint8)
    out = io.BytesIO()
    Image.frombytes("RGB", (width, height), data.numpy().tobytes()).save(out, "png")
    return out.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()
