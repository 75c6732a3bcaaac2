"""Loads a model's tokenizer. Imports transformers in its functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .folder_checks import check_tokenizer
from .folder_files import naming
from .guarded_tokenizers import guarded


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a folder.

    Raises ValueError with file and field, and what transformers raises for other damage.
    """
    import transformers

    check_tokenizer(folder)
    with naming("its tokenizer must be one that transformers loads"):
        found: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    make_plain(getattr(found, "backend_tokenizer", None))
    return guarded(found)


def make_plain(core: Any) -> None:
    """Turn off BPE dropout, truncation and padding of a tokenizer of the library tokenizers.

    A tokenizer.json may have them from the training that saved it. Dropout splits a text
    differently each time, and padding has no limit. None is left alone.
    """
    if core is None:
        return
    core.no_truncation()
    core.no_padding()
    if getattr(core.model, "dropout", None) is not None:
        core.model.dropout = None


def appended_end(tokenizer: Any) -> str | None:
    """Return the end token that a tokenizer appends to every text; None: it appends none."""
    end = tokenizer.eos_token_id
    whole = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    is_appended = end is not None and whole[-1:] == [end] != bare[-1:]
    return str(tokenizer.eos_token) if is_appended else None


def appended_end_words(end: str) -> str:
    """Return what it means that a tokenizer appends the token `end`, in a sentence."""
    return f"its tokenizer appends {end} to prompts: completions begin a new text, except in chats"
