"""The tokenizer of a model as llama.cpp has it, by its tokenizer.json.

llama.cpp splits text by rules in its own code, which a file only names. A tokenizer is written only
if its rules are those of a name; otherwise the model would read other tokens than it was trained
on.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from ...errors import SpecError
from ..folder_checks import check_tokenizer
from ..folder_files import MOST_JSON, read_json
from ..tokenizer_folder import TokenizerFolder

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# By the regular expression before the byte-level step: the name in llama.cpp, and whether a piece
# that is a token as a whole is taken without merges.
SPLITS = {
    _CONTRACTIONS + _WORDS + r"\p{N}" + _REST: ("qwen2", False),
    _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST: ("llama-bpe", True),
}
_SPACE = "\u2581"  # in place of a space, in SentencePiece
_NUM_BYTES = 256


class Vocabulary:
    """The tokens of a model by their ids, and how llama.cpp makes them of a text."""

    def __init__(self, folder: Path, size: int) -> None:
        """`size`: the rows of the embedding. Raises SpecError for rules without a name there."""
        try:
            check_tokenizer(folder)
            self._file = read_json(folder / "tokenizer.json", MOST_JSON)
        except (OSError, ValueError) as error:
            raise SpecError("gguf", f"needs a tokenizer.json: {error}") from error
        model = self._file.get("model") or {}
        if model.get("type") != "BPE":
            raise _refused("model.type", "BPE", model.get("type"))
        self._model = model
        for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name):
                raise _refused(f"model.{name}", "absent", model[name])
        self._merges = [
            tuple(pair.split(" ", 1) if isinstance(pair, str) else pair) for pair in model["merges"]
        ]
        self._folder, self._size = folder, size
        self.notes: list[str] = []
        self._is_bytes = not model.get("byte_fallback")
        if self._is_bytes:
            self._pre = self._name_of_rules()
            self._check_bytes()
        else:
            self._has_prefix = self._has_space_prefix()
            self._scores = self._scores_of_merges()

    def write(self, writer: Any, ends: list[int]) -> None:
        """Add the tokenizer to a gguf.GGUFWriter; `ends`: tokens that end a completion."""
        texts, types = self._tokens()
        if self._is_bytes:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(self._pre)
            writer.add_token_list(texts)
            writer.add_token_types(types)
            writer.add_token_merges([" ".join(pair) for pair in self._merges])
        else:
            writer.add_tokenizer_model("llama")
            writer.add_token_list(texts)
            writer.add_token_scores([self._scores.get(text, 0.0) for text in texts])
            writer.add_token_types(types)
            writer.add_add_space_prefix(self._has_prefix)
        self._write_special(writer, ends)

    def _write_special(self, writer: Any, ends: list[int]) -> None:
        """Add which tokens begin and end a text."""
        tokenizer = self._library()
        plain, whole = (tokenizer.encode("a", add_special_tokens=add).ids for add in (False, True))
        number = len(whole) - len(plain)
        before = next((i for i in range(number + 1) if whole[i : i + len(plain)] == plain), 0)
        begin, end = whole[:before], whole[before + len(plain) :]
        if len(begin) > 1 or len(end) > 1:
            takes = "at most one token before a text and one behind it"
            raise _refused("post_processor", takes, f"{len(begin)} and {len(end)}")
        writer.add_add_bos_token(bool(begin))
        writer.add_add_eos_token(bool(end))
        known = TokenizerFolder(self._folder).special_tokens()
        ids = {name: tokenizer.token_to_id(text) for name, text in known.items()}
        if begin or ids.get("bos_token") is not None:
            writer.add_bos_token_id(begin[0] if begin else ids["bos_token"])
        every = [*end, *(one for one in ends if one not in end)]
        if every:
            writer.add_eos_token_id(every[0])
        if len(every) > 1:
            writer.add_eot_token_id(every[1])  # "of turn": ends a completion, too
        if len(every) > 2:
            listed = ", ".join(map(str, every[2:]))
            self.notes.append(f"end tokens: a file has two; llama.cpp knows {listed} by their text")
        if ids.get("pad_token") is not None:
            writer.add_pad_token_id(ids["pad_token"])
        if self._model.get("unk_token") is not None:
            writer.add_unk_token_id(tokenizer.token_to_id(self._model["unk_token"]))

    def _library(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._folder / "tokenizer.json"))

    def _tokens(self) -> tuple[list[str], list[int]]:
        """Return the text and the type of each row of the embedding."""
        import gguf  # type: ignore[import-not-found, unused-ignore]

        kinds = gguf.TokenType
        texts = [f"[PAD{number}]" for number in range(self._size)]
        types = [int(kinds.UNUSED)] * self._size
        for text, number in self._model["vocab"].items():
            self._check_row(text, number)
            is_byte = not self._is_bytes and text in _BYTES
            is_unknown = text == self._model.get("unk_token")
            kind = kinds.BYTE if is_byte else kinds.UNKNOWN if is_unknown else kinds.NORMAL
            texts[number], types[number] = text, int(kind)
        for added in self._added():
            number, text = added["id"], added["content"]
            self._check_row(text, number)
            if types[number] == kinds.UNKNOWN:
                continue
            if any(added.get(name) for name in ("lstrip", "rstrip", "single_word")):
                self.notes.append(f"token {text!r}: llama.cpp leaves the spaces around it")
            kind = kinds.CONTROL if added.get("special") else kinds.USER_DEFINED
            texts[number], types[number] = text, int(kind)
        return texts, types

    def _check_row(self, text: str, number: int) -> None:
        if number >= self._size:
            takes = f"below {self._size}, the rows of the embedding"
            raise _refused(f"the id of {text!r}", takes, number)

    def _added(self) -> list[dict[str, Any]]:
        return self._file.get("added_tokens") or []

    def _name_of_rules(self) -> str:
        """Return llama.cpp's name for the rules of a byte-level tokenizer."""
        normalizer = self._file.get("normalizer")
        if normalizer == {"type": "NFC"}:
            self.notes.append("text: the tokenizer normalizes it to NFC, llama.cpp does not")
        elif normalizer is not None:
            raise _refused("normalizer", "absent or NFC", normalizer.get("type"))
        for name in ("unk_token", "fuse_unk"):
            if self._model.get(name):
                raise _refused(f"model.{name}", "absent", self._model[name])
        name, ignores = self._split(self._file.get("pre_tokenizer") or {})
        if bool(self._model.get("ignore_merges")) != ignores:
            takes = f"{ignores}, as in {name}"
            raise _refused("model.ignore_merges", takes, not ignores)
        return name

    def _split(self, rules: dict[str, Any]) -> tuple[str, bool]:
        steps = rules.get("pretokenizers", [rules])
        if any(step.get("add_prefix_space") for step in steps):
            raise _refused("pre_tokenizer.add_prefix_space", False, True)
        kinds = [step.get("type") for step in steps]
        splits_bytes = bool(steps[-1].get("use_regex", True))
        if kinds == ["ByteLevel"] and splits_bytes:
            return "gpt-2", False
        if kinds == ["Digits", "ByteLevel"] and splits_bytes and steps[0]["individual_digits"]:
            return "smollm", False
        if kinds == ["Split", "ByteLevel"] and not splits_bytes:
            first = steps[0]
            expression = (first.get("pattern") or {}).get("Regex")
            is_plain = first.get("behavior") == "Isolated" and not first.get("invert")
            if is_plain and expression in SPLITS:
                return SPLITS[expression]
        takes = "one of those of gpt-2, llama-bpe (Llama 3), qwen2, smollm, which llama.cpp has"
        shown = ", ".join(map(str, kinds))
        raise _refused("pre_tokenizer", takes, f"another one ({shown}), and none is guessed")

    def _check_bytes(self) -> None:
        from tokenizers.pre_tokenizers import ByteLevel

        absent = set(ByteLevel.alphabet()) - self._model["vocab"].keys()
        if absent:
            takes = f"a vocabulary with all {_NUM_BYTES} bytes"
            raise _refused("model.vocab", takes, f"{_NUM_BYTES - len(absent)}")

    def _has_space_prefix(self) -> bool:
        """Check the rules of a SentencePiece tokenizer; return whether a text gets a space."""
        if absent := _BYTES - self._model["vocab"].keys():
            takes = f"a vocabulary with all {_NUM_BYTES} bytes"
            raise _refused("model.vocab", takes, f"{_NUM_BYTES - len(absent)}")
        has_prefix = False
        rules = self._file.get("normalizer") or {}
        for step in rules.get("normalizers", [rules] if rules else []):
            if step == {"type": "Prepend", "prepend": _SPACE}:
                has_prefix = True
            elif step != {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}:
                raise _refused("normalizer", "that of SentencePiece", step.get("type"))
        rules = self._file.get("pre_tokenizer") or {}
        if rules.get("type") == "Metaspace":
            if rules.get("replacement") != _SPACE or rules.get("split"):
                raise _refused("pre_tokenizer", "a Metaspace that does not split", "another one")
            has_prefix = rules.get("prepend_scheme", "always") != "never"
            if rules.get("prepend_scheme") == "first":
                self.notes.append("text behind a special token: llama.cpp adds a space there, too")
        elif rules and rules.get("type") != "Split":  # at spaces, which are replaced before
            raise _refused("pre_tokenizer", "absent or Metaspace", rules.get("type"))
        return has_prefix

    def _scores_of_merges(self) -> dict[str, float]:
        """Return scores with which llama.cpp merges as the merges of a SentencePiece tokenizer do.

        llama.cpp merges any two neighbors whose text is a token, that with the highest score first.
        """
        results = ["".join(pair) for pair in self._merges]
        ranks = {text: rank for rank, text in reversed(list(enumerate(results)))}
        changes = [later for earlier, later in pairwise(results) if later != earlier]
        if len(ranks) != len(changes) + bool(results):
            raise _refused("model.merges", "grouped by the token that they make", "other ones")
        vocab, merges = self._model["vocab"], set(self._merges)
        added = {one["content"] for one in self._added()}
        for text in vocab.keys() - added - _BYTES:
            for cut in range(1, len(text)):
                pair = (text[:cut], text[cut:])
                if pair not in merges and all(part in vocab for part in pair):
                    takes = "all pairs of tokens that make a token"
                    raise _refused("model.merges", takes, f"none for {' and '.join(pair)}")
        return {text: -float(rank) for text, rank in ranks.items()}


_BYTES = {f"<0x{number:02X}>" for number in range(_NUM_BYTES)}


def _refused(name: str, takes: object, got: object) -> SpecError:
    return SpecError("gguf", f"tokenizer.json: {name} must be {takes} for llama.cpp, got {got}")
