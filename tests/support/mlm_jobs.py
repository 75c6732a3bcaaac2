"""MLM jobs that take a second: tiny architectures, short texts, a folder to run in, results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import tiny
import torch
from transformers import (
    AutoModelForMaskedLM,
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

CLOCK = {"seconds"}  # fields of events that differ between runs
SOURCE = '''
import json


def double(number: int) -> int:
    """Twice the number."""
    return add(number, number)


class Class{n}:
    limit = {n}

    def value(self) -> int:
        return double(self.limit)
'''


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


def graph_spec(home: Path, **options: Any) -> MlmSpec:
    """A job of 8 steps of a tiny code-graph encoder."""
    small = {
        "data": str(home / "sources"),
        "vocab_size": 300,
        "seq_len": 64,
        "hidden_size": 16,
        "layers": 2,
        "heads": 2,
        "ffn_size": 32,
        "learning_rate": 3e-3,
        "batch_size": 2,
        "gradient_accumulation": 2,
        "steps": 8,
        "mnm_ramp_steps": 4,
        "validation": 0.25,
        "eval_every": 3,
        "save_every": 3,
        "keep": 100,
    }
    return MlmSpec.parse(small | options)


def begin(home: Path, name: str) -> tiny.Surroundings:
    return tiny.surroundings(home / "runs" / name)


def weights(folder: Path, auto: Any = AutoModelForMaskedLM) -> dict[str, torch.Tensor]:
    return dict(auto.from_pretrained(folder).state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def by_step(events: list[dict[str, Any]], type: str) -> dict[int, dict[str, Any]]:
    """The events of one type by step, without times."""
    return {
        event["step"]: {key: event[key] for key in event.keys() - CLOCK}
        for event in events
        if event["type"] == type
    }
