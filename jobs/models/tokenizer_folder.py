"""Tokenizer files of a model, read without transformers, whose import takes seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import JobFailed, SpecError
from .chat_templates import ChatTemplate
from .folder_checks import check_tokenizer
from .folder_files import MOST_SETTINGS, TEMPLATES, read_bytes, read_json
from .guarded_tokenizers import rules_of, try_rules
from .pretrained_tokenizer import make_plain
from .vocabulary import Vocabulary

_MOST_CHARACTERS = 100_000  # of a text, at most, that are tokenized
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


class TokenizerFolder:
    """The files of a tokenizer, and the config.json of its model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def positions(self) -> int | None:
        """Return the context length in tokens; None when the config does not name it."""
        return self._setting("max_position_embeddings")

    def lacks_chat_template(self) -> bool:
        """Whether there is a tokenizer config but no chat template."""
        files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
        config = self._read("tokenizer_config.json")
        is_there = any((self._folder / name).exists() for name in files)
        return bool(config) and not config.get("chat_template") and not is_there

    def chat_template(self) -> ChatTemplate | None:
        """The chat template that transformers uses; None if there is none."""
        sources = self._template_sources()
        default = sources.get("default")
        if default is None:
            return None
        with_tools = sources.get("tool_use")
        return ChatTemplate.of_sources(default, with_tools, self.special_tokens())

    def is_generic(self) -> bool:
        """Whether the files name all special tokens: the tokenizer's class adds none of its own."""
        return self._read("tokenizer_config.json").get("tokenizer_class") in _GENERIC

    def special_tokens(self) -> dict[str, str]:
        """The special tokens by their names, such as eos_token."""
        config = self._read("special_tokens_map.json") | self._read("tokenizer_config.json")
        named = {name: _token(value) for name, value in config.items() if name.endswith("_token")}
        return {name: text for name, text in named.items() if text}

    def counter(self) -> Callable[[str], int] | None:
        """Return a function that counts a text's non-special tokens; None: no tokenizer.json."""
        encode = self.encoder()
        return None if encode is None else lambda text: len(encode(text))

    def encoder(self) -> Callable[[str], list[int]] | None:
        """Return a function that returns a text's non-special tokens; None: no tokenizer.json."""
        return None if self._tokenizer is None else self._encode

    def _encode(self, text: str) -> list[int]:
        """Raises SpecError for a tokenizer whose rules take too long."""
        if self._rules is not None:
            try:
                try_rules(self._rules, text, str(self._folder))
            except JobFailed as error:
                raise SpecError("model", f"must have a usable tokenizer: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def vocabulary(self, name: str) -> Vocabulary | None:
        """Return the tokens that the model has embeddings for; None: its files do not say.

        `name`: of the model, for messages.
        """
        tokenizer, size = self._tokenizer, self._setting("vocab_size")
        return (
            None
            if tokenizer is None or size is None
            else Vocabulary(size, name, tokenizer.id_to_token)
        )

    def decoder(self) -> Callable[[list[int]], str] | None:
        """Return a function that returns the text of tokens; None: no tokenizer.json."""
        tokenizer = self._tokenizer
        return None if tokenizer is None else lambda ids: str(tokenizer.decode(ids))

    def longer_than(
        self, room: int, texts: Iterable[tuple[int, str]], *, until: float
    ) -> tuple[int, str] | None:
        """Return row and number of tokens of the first text of more than `room` tokens, or None.

        None also without a tokenizer.json, and if `until` (of time.monotonic) is reached first; at
        least one text is counted. Special tokens are not counted: the result does not depend on
        those that the tokenizer adds.
        """
        for row, text in texts:
            # A text has at most as many tokens as bytes, so few texts must be tokenized.
            readable = text.encode(errors="replace")  # it may have lone surrogates
            if len(readable) > room:
                if self._tokenizer is None:
                    return None
                begin = readable.decode()[:_MOST_CHARACTERS]
                num_tokens = len(self._encode(begin))
                is_whole = len(begin) == len(text)
                surely = num_tokens if is_whole else num_tokens - 1  # the cut may have split one
                if surely > room:
                    return row, f"{surely}" if is_whole else f"at least {surely}"
            if time.monotonic() > until:
                break
        return None

    @cached_property
    def _tokenizer(self) -> Any:
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            return None
        from tokenizers import Tokenizer

        try:
            check_tokenizer(self._folder)
            tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception:  # the library raises any type; the job will report it
            return None
        make_plain(tokenizer)
        # Transformers adds special tokens that tokenizer.json lacks; split, they would be more
        # tokens.
        added = self._read("tokenizer_config.json").get("added_tokens_decoder")
        texts = map(_token, added.values()) if isinstance(added, dict) else ()
        known = {*self.special_tokens().values(), *filter(None, texts)}
        tokenizer.add_special_tokens(sorted(known))
        return tokenizer

    @cached_property
    def _rules(self) -> str | None:
        return rules_of(self._tokenizer)

    def _template_sources(self) -> dict[str, str]:
        """The chat templates by their names; `default` is that of a tokenizer with one."""
        found = self._template_files()
        if found:
            return found
        named = self._read("tokenizer_config.json").get("chat_template")
        if isinstance(named, list):  # several, each with its name
            items = [(i.get("name"), i.get("template")) for i in named if isinstance(i, dict)]
            return {n: t for n, t in items if isinstance(n, str) and isinstance(t, str)}
        return {"default": named} if isinstance(named, str) else {}

    def _template_files(self) -> dict[str, str]:
        paths = {"default": self._folder / "chat_template.jinja"}
        paths |= {path.stem: path for path in (self._folder / TEMPLATES).glob("*.jinja")}
        found = {}
        for name, path in paths.items():
            with suppress(OSError, ValueError):
                found[name] = read_bytes(path, MOST_SETTINGS).decode()
        return found

    def _setting(self, name: str) -> int | None:
        config = self._read("config.json")
        value = (config.get("text_config") or config).get(name)
        return value if isinstance(value, int) else None

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return read_json(self._folder / name)
        except (OSError, ValueError):
            return {}


def _token(value: Any) -> str | None:
    """The text of a special token, which a config has as text or as the fields of an AddedToken."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
