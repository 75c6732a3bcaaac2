"""Tiny random models with tokenizers that llama.cpp has, for tests of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from warmd.jobs.models.gguf.tokenizers import SPLITS

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN2, _LLAMA3 = SPLITS
_TEXTS = [(Path(__file__).parents[2] / "LICENSE").read_text()]  # for tokenizers to train on


def byte_level(rules: str) -> Tokenizer:
    """A byte-level tokenizer of 1,000 tokens with the rules of this name."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=rules == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    after_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if rules in ("qwen2", "llama-bpe"):
        expression = Regex({"qwen2": _QWEN2, "llama-bpe": _LLAMA3}[rules])
        steps: Any = [pre_tokenizers.Split(expression, "isolated"), after_split]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif rules == "smollm":
        digits: Any = [pre_tokenizers.Digits(individual_digits=True), plain]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits)
    else:
        tokenizer.pre_tokenizer = plain
    if rules == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(
            vocab_size=1000,
            show_progress=False,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


def sentencepiece() -> Tokenizer:
    """A tokenizer of SentencePiece's BPE, whose merges are all pairs that make a token."""
    made = Tokenizer(models.BPE(unk_token=SPECIAL[0]))
    steps: Any = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence(steps)
    made.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=SPECIAL),
    )
    content = json.loads(made.to_str())
    found = content["model"]
    merges = []
    vocab = found["vocab"]
    for text in sorted(vocab, key=vocab.__getitem__):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += [pair for pair in pairs if text not in SPECIAL and vocab.keys() >= set(pair)]
    found |= {"merges": merges, "byte_fallback": True, "fuse_unk": True}
    for number in range(256):
        vocab[f"<0x{number:02X}>"] = len(vocab)
    return Tokenizer.from_str(json.dumps(content))


def make(folder: Path, kind: str, rules: str, **settings: Any) -> Any:
    """Save a tiny random model, and return it; its weights are those of float16."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        **{
            **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 160},
            **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"max_position_embeddings": 512, "initializer_range": 0.15},
            **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
            **settings,
        },
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            weight.copy_(weight.half().float())
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=sentencepiece() if rules == "sentencepiece" else byte_level(rules),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHATML
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
