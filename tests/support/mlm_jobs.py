"""MLM jobs that take a second: tiny architectures, short texts, and a folder to run in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from transformers import (
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ModernBertConfig,
    RobertaConfig,
)

from warmd.jobs.mlm.options import MlmSpec

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(intermediate_size=32, max_position_embeddings=64, **SIZES),
    "roberta": RobertaConfig(intermediate_size=32, max_position_embeddings=66, **SIZES),
    "distilbert": DistilBertConfig(
        dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=64
    ),
    "modernbert": ModernBertConfig(
        intermediate_size=32, max_position_embeddings=64, embedding_dropout=0.1, **SIZES
    ),
    "deberta": DebertaV2Config(intermediate_size=32, max_position_embeddings=64, **SIZES),
}


def make_home(folder: Path) -> Path:
    """Fill a folder with texts, the configurations and a place for runs; return it."""
    rows = [{"text": f"number {n}, then {n + 1} and {n + 2}{' more' * (n % 9)}"} for n in range(80)]
    (folder / "texts.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    for name, config in CONFIGS.items():
        config.save_pretrained(folder / name)
    (folder / "runs").mkdir()
    return folder


def text_spec(home: Path, architecture: str = "bert", **options: Any) -> MlmSpec:
    """A job of 12 steps of a tiny model on short texts."""
    small = {
        "objective": "mlm",
        "architecture": architecture if architecture == "code-graph" else str(home / architecture),
        "data": str(home / "texts.jsonl"),
        "vocab_size": 300,
        "seq_len": 32,
        "learning_rate": 3e-3,
        "batch_size": 2,
        "gradient_accumulation": 2,
        "steps": 12,
        "validation": 0.2,
        "eval_every": 5,
        "save_every": 4,
        "keep": 100,
    }
    return MlmSpec.parse(small | options)
