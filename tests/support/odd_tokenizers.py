"""Tokenizers of few tokens whose completions cannot be decoded token by token, or alone."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghij "


def bytewise() -> Any:
    """One token per byte, as GPT-2 writes them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core)


def joining() -> Any:
    """One token per byte, and some of several letters, or of a space and a part of a character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "d"), ("Ġ", "â"), ("Ġâ", "Ģ"), ("e", "Ã")]
    words = [*letters, *map("".join, merges)]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core)


def spaced() -> Any:
    """One token per letter; a text that is decoded alone loses its first space, as with Llama 2.

    Other characters are tokens of single bytes.
    """
    bytes_of = [f"<0x{number:02X}>" for number in range(256)]
    words = ["<s>", "</s>", "<unk>", *bytes_of, *LETTERS.replace(" ", "▁")]
    vocabulary = {word: number for number, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def merging() -> Any:
    """One token per letter, and one of a space with the "c" after it, as of many words in GPT-2."""
    words = ["<pad>", "<bos>", "<eos>", *LETTERS.replace(" ", "Ġ"), "Ġc"]
    vocabulary = {word: number for number, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, [("Ġ", "c")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
