"""Tiny cross-encoders: models with one label that read a query and a passage together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import CHARACTERS
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

SPECIAL = ("[PAD]", "[CLS]", "[SEP]")
SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(CHARACTERS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.2,
    "num_labels": 1,
    "pad_token_id": 0,
}
POSITIONS = 64
MODELS = ("bert", "roberta", "deberta", "llama")


def tokenizer(name: str = "bert", *, side: str = "right") -> Any:
    """One token per character: [CLS] query [SEP] passage [SEP].

    Token types are 0 and 1, for models that take them.
    """
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    types = ["token_type_ids"] if name in ("bert", "deberta") else []
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=core,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        truncation_side=side,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", *types, "attention_mask"],
    )


def model(name: str = "bert", **settings: Any) -> Any:
    """A random model with one label."""
    sizes = {**SIZES, "max_position_embeddings": POSITIONS, **settings}
    torch.manual_seed(0)
    made: Any
    match name:
        case "bert":
            made = BertForSequenceClassification(BertConfig(**sizes))
        case "roberta":
            more = {"type_vocab_size": 1, "max_position_embeddings": POSITIONS + 1}
            made = RobertaForSequenceClassification(RobertaConfig(**sizes | more))
        case "deberta":
            made = DebertaV2ForSequenceClassification(DebertaV2Config(**sizes, type_vocab_size=0))
        case _:
            made = LlamaForSequenceClassification(LlamaConfig(**sizes))
    return made.requires_grad_(False).eval()


def save(folder: Path, name: str = "bert", **settings: Any) -> Path:
    """Save a model with its tokenizer; settings of its config.json."""
    model(name, **settings).save_pretrained(folder)
    tokenizer(name).save_pretrained(folder)
    return folder
