"""Checks the files of a model folder before a library opens them, and names file and field.

A model folder is untrusted input. Libraries wait for ever at a named pipe, and fail somewhere
inside for a text in the place of a number. Fields that are not listed here are left to
transformers. Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import weight_headers
from .folder_files import (
    MOST_JSON,
    MOST_SETTINGS,
    NOT_READ,
    SUFFIXES,
    TEMPLATES,
    BadFile,
    check_regular,
    read_bytes,
    read_json,
    shown,
)
from .guarded_tokenizers import expressions, is_usual
from .tokenizer_growth import growth

_TOKENIZER = "tokenizer.json"
_MOST_ID = 2**31  # tokenizers take no larger ids
_MOST_WORD = 10_000  # characters of a token, and of a word: WordPiece needs the square of them
_MOST_GROWTH = 1_000  # times that the rules of a tokenizer may lengthen a text, in bytes
_MOST_TOKENS = 16  # times that they may lengthen its tokens: BERT's for two texts have 5 for 2
_MOST_AFFIX = 100  # characters added to each part of a word; known ones have 4
_MOST_SHOWN = 40  # characters of a token
_MOST_LABELS = 1_000_000  # transformers makes a name for each
_MOST_ADDED = 100_000  # tokens: the library needs the square of them
_MOST_LOOPS = 3  # in an expression that is tried on the name of every layer
_MOST_OPTIONAL = 8
_ADAPTER = "adapter_model.safetensors"


@dataclass(frozen=True)
class _Takes:
    """What a field takes: in words, and as a function."""

    words: str
    fits: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_token(value: Any) -> bool:
    return _is_text(value.get("content") if isinstance(value, dict) else value)


def _is_template(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(value.get(key)) for key in ("name", "template"))


def _either(*fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(one(value) for one in fits)


def _holds_numbers(value: Any) -> bool:
    """Whether a value is a number, a flag or null, or holds nothing else in lists and objects.

    Texts that say how a size is meant ("shortest_edge") are keys.
    """
    if isinstance(value, list | dict):
        return all(map(_holds_numbers, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, int | float)


def _is_rope(value: Any) -> bool:
    """Whether a value has the settings of rotary positions, also for each type of layers."""
    return isinstance(value, dict) and all(
        _is_text(one) if name in ("rope_type", "type") else _holds_numbers(one) or _is_rope(one)
        for name, one in value.items()
    )


_COUNT = _Takes("an integer above 0", lambda value: _is_int(value) and value > 0)
_COUNTS = _Takes(
    "an integer above 0, or a list of them",
    lambda value: value != [] and _either(_COUNT.fits, _is_list(_COUNT.fits))(value),
)
_NUMBERS = _Takes("a number, or numbers", _holds_numbers)
_NUMBER = _Takes("a number", _is_number)
_FLAG = _Takes("true or false", lambda value: isinstance(value, bool))
_TEXT = _Takes("a text", _is_text)
_TEXTS = _Takes("a list of texts", _is_list(_is_text))
_TEXT_OR_TEXTS = _Takes("a text, or a list of texts", _either(_is_text, _is_list(_is_text)))
_OBJECT = _Takes("an object", lambda value: isinstance(value, dict))
_ID = _Takes("the number of a token, or a list of them", _either(_is_int, _is_list(_is_int)))
_IDS = _Takes("a list of numbers of tokens", _is_list(_is_int))
_TOKEN = _Takes("a text, or an object with the text `content`", _is_token)
_TOKENS = _Takes("a list of tokens", _is_list(_is_token))

_ESCAPED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # also whole classes
# Groups that are repeated, references to groups, comments and verbose expressions.
_UNBOUNDED = re.compile(r"\)\s*[*+{]|\(\?P=|\(\?\(|\(\?#|\(\?[a-zA-Z]*x")
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")


def _is_bounded(expression: Any) -> bool:
    """Whether a regular expression needs little time for a name, by a sufficient condition."""
    if not isinstance(expression, str) or _REFERENCE.search(expression):
        return False
    plain = _ESCAPED.sub("x", expression)
    loops = len(re.findall(r"[*+{]", plain))
    few = loops <= _MOST_LOOPS and plain.count("?") <= _MOST_OPTIONAL
    return few and _UNBOUNDED.search(plain) is None


def _has_loop(expression: str) -> bool:
    return re.search(r"[*+{]", _ESCAPED.sub("x", expression)) is not None


_BOUNDED = (
    f"a regular expression without repeated groups, with at most {_MOST_LOOPS} of *, + and {{}}"
)
_EXPRESSION = _Takes(f"names in a list, or {_BOUNDED}", _either(_is_list(_is_text), _is_bounded))
_EXPRESSIONS = _Takes(_BOUNDED, _either(_is_bounded, _is_list(_is_bounded)))
_ROPE = _Takes("an object with numbers, and a text as its type", _is_rope)
_CONFIG: Mapping[str, _Takes] = {
    **dict.fromkeys(("max_position_embeddings", "vocab_size", "n_positions", "n_ctx"), _COUNT),
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "n_embd", "n_layer", "n_head"), _COUNTS),
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), _COUNTS),
    **dict.fromkeys(("hidden_act", "_name_or_path", "torch_dtype", "dtype"), _TEXT),
    **dict.fromkeys(("architectures", "layer_types", "mlp_layer_types"), _TEXTS),
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), _ID),
    **dict.fromkeys(("tie_word_embeddings", "is_encoder_decoder", "use_cache"), _FLAG),
    **dict.fromkeys(("text_config", "vision_config", "audio_config"), _OBJECT),
    **dict.fromkeys(("id2label", "label2id", "auto_map", "quantization_config"), _OBJECT),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _ROPE),
    "task_specific_params": _OBJECT,
    "rope_theta": _NUMBERS,
    "num_labels": _Takes(
        f"a number from 0 to {_MOST_LABELS:,}",
        lambda value: _is_int(value) and 0 <= value <= _MOST_LABELS,
    ),
}
_GENERATION: Mapping[str, _Takes] = {
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id", "forced_eos_token_id"), _ID),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), _IDS),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "typical_p", "top_h"), _NUMBER),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "guidance_scale"), _NUMBER),
    **dict.fromkeys(("encoder_repetition_penalty", "penalty_alpha"), _NUMBER),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), _NUMBER),
    **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "min_new_tokens"), _NUMBER),
    **dict.fromkeys(("do_sample", "use_cache", "remove_invalid_values"), _FLAG),
    **dict.fromkeys(("renormalize_logits", "token_healing"), _FLAG),
    "bad_words_ids": _Takes("a list of lists of numbers", _is_list(_is_list(_is_int))),
    "stop_strings": _TEXT_OR_TEXTS,
    "watermarking_config": _OBJECT,
}
_TOKENIZER_CONFIG: Mapping[str, _Takes] = {
    "tokenizer_class": _TEXT,
    "chat_template": _Takes(
        "a text, or a list of objects with name and template",
        _either(_is_text, _is_list(_is_template)),
    ),
    "added_tokens_decoder": _Takes(
        "an object with a token for each number",
        lambda value: (
            isinstance(value, dict)
            and all(_is_id(key) and _is_token(token) for key, token in value.items())
        ),
    ),
    "additional_special_tokens": _TOKENS,
    "extra_special_tokens": _Takes(
        "tokens, in a list or by name",
        lambda value: _TOKENS.fits([*value.values()] if isinstance(value, dict) else value),
    ),
    "model_max_length": _NUMBER,
    "model_input_names": _TEXTS,
    "auto_map": _OBJECT,
    **dict.fromkeys(("padding_side", "truncation_side"), _TEXT),
    **dict.fromkeys(("do_lower_case", "clean_up_tokenization_spaces"), _FLAG),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "split_special_tokens"), _FLAG),
}
_PROCESSOR: Mapping[str, _Takes] = {
    **dict.fromkeys(("image_processor_type", "processor_class", "feature_extractor_type"), _TEXT),
    **dict.fromkeys(("image_mean", "image_std", "rescale_factor"), _NUMBERS),
    **dict.fromkeys(("min_pixels", "max_pixels"), _NUMBER),
    **dict.fromkeys(("size", "crop_size"), _NUMBERS),
    **dict.fromkeys(("patch_size", "merge_size", "temporal_patch_size"), _NUMBERS),
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), _FLAG),
    **dict.fromkeys(("do_center_crop", "do_pad"), _FLAG),
    "auto_map": _OBJECT,
}
_BY_MODULE = _Takes(
    f"an object with a number for each module: its name, or {_BOUNDED}",
    lambda value: (
        isinstance(value, dict)
        and all(map(_is_number, value.values()))
        and all(map(_is_bounded, value))
        and sum(map(_has_loop, value)) <= _MOST_LOOPS
    ),
)
_ADAPTER_CONFIG: Mapping[str, _Takes] = {
    **dict.fromkeys(("peft_type", "base_model_name_or_path", "task_type", "revision"), _TEXT),
    **dict.fromkeys(("r", "init_r", "target_r"), _NUMBER),
    **dict.fromkeys(("lora_alpha", "lora_dropout"), _NUMBER),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), _BY_MODULE),
    **dict.fromkeys(("target_modules", "exclude_modules"), _EXPRESSION),
    "layers_pattern": _EXPRESSIONS,
    "modules_to_save": _TEXTS,
    "target_parameters": _TEXTS,
    "bias": _TEXT,
    "layers_to_transform": _Takes("a number, or numbers", _either(_is_int, _is_list(_is_int))),
    **dict.fromkeys(("fan_in_fan_out", "inference_mode", "use_rslora", "use_dora"), _FLAG),
}
_SETTINGS: Mapping[str, Mapping[str, _Takes]] = {
    "adapter_config.json": _ADAPTER_CONFIG,
    "added_tokens.json": {},
    "chat_template.json": {"chat_template": _TOKENIZER_CONFIG["chat_template"]},
    "config.json": _CONFIG,
    "generation_config.json": _GENERATION,
    "preprocessor_config.json": _PROCESSOR,
    "processor_config.json": _TOKENIZER_CONFIG,
    "special_tokens_map.json": _TOKENIZER_CONFIG,
    "tokenizer_config.json": _TOKENIZER_CONFIG,
    "video_preprocessor_config.json": _PROCESSOR,
}
# Names of settings that are numbers in every architecture, where a text would be multiplied.
_NUMBER_ENDS = (
    *("size", "sizes", "dim", "dims", "groups", "rank", "(?<!aspect_)ratio", "eps", "epsilon"),
    *("theta", "factor", "window", "pixels", "dropout", "prob", "pdrop", "range", "multiplier"),
    "positions",
)
_IS_NUMBER = re.compile(rf"^(num|n|max|min|top)_|_({'|'.join(_NUMBER_ENDS)})$")
_IS_TOKEN = re.compile(r"^(bos|eos|unk|sep|pad|cls|mask|image|video|audio)_token$")


def check_folder(folder: Path) -> None:
    """Raise ValueError with file and field for the first wrong file of a model or an adapter.

    Reads settings and headers only; `check_tokenizer` reads the vocabulary.
    """
    for path in _read_files(folder):
        check_regular(path)
    for name, fields in _SETTINGS.items():
        if os.path.lexists(folder / name):
            _check_settings(name, "", read_json(folder / name), fields)
    for path in _templates(folder):
        _check_text(path)
    if os.path.lexists(folder / _ADAPTER):
        weight_headers.header(folder / _ADAPTER)
    if not os.path.lexists(folder / "adapter_config.json"):
        weight_headers.check_headers(folder)


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a model's config.json. Raises BadFile with the field, and OSError."""
    config = read_json(path)
    _check_settings(path.name, "", config, _CONFIG)
    return config


def check_tokenizer(folder: Path) -> None:
    """Raise ValueError with file and field for a wrong file of a tokenizer."""
    for path in _read_files(folder):
        check_regular(path)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if os.path.lexists(folder / name):
            _check_settings(name, "", read_json(folder / name), _SETTINGS[name])
    for name in ("added_tokens.json", "vocab.json"):
        if os.path.lexists(folder / name):
            vocabulary = read_json(folder / name, MOST_JSON)
            _check_lengths(name, "its content", vocabulary)
            _check_ids(name, "", vocabulary)
    if os.path.lexists(folder / _TOKENIZER):
        _check_rules(read_json(folder / _TOKENIZER, MOST_JSON))


def _read_files(folder: Path) -> Iterator[Path]:
    """Yield what has the name of a file that transformers or warmd may read."""
    places = [folder, *([folder / TEMPLATES] if (folder / TEMPLATES).is_dir() else [])]
    for place in places:
        with os.scandir(place) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            is_read = os.path.splitext(name)[1] in SUFFIXES and name not in NOT_READ
            if is_read and not name.startswith("."):
                yield place / name


def _templates(folder: Path) -> list[Path]:
    return sorted((*folder.glob("*.jinja"), *(folder / TEMPLATES).glob("*.jinja")))


def _check_text(path: Path) -> None:
    try:
        read_bytes(path, MOST_SETTINGS).decode()
    except UnicodeDecodeError as error:
        raise BadFile(path.name, "", "UTF-8", f"byte {error.start}: {error.reason}") from error


def _check_settings(
    file: str, prefix: str, settings: Mapping[str, Any], fields: Mapping[str, _Takes]
) -> None:
    """Check settings and those of the parts of a model (text_config, …); null is always taken."""
    for name, value in settings.items():
        takes = fields.get(name)
        if takes is None and _IS_TOKEN.search(name) and fields is _TOKENIZER_CONFIG:
            takes = _TOKEN
        if takes is None and fields in (_CONFIG, _GENERATION) and _IS_NUMBER.search(name):
            takes = _NUMBERS
        if takes is not None and value is not None and not takes.fits(value):
            raise BadFile(file, f"{prefix}{name}", takes.words, shown(value))
        is_part = name.endswith("_config") and name != "quantization_config"
        if isinstance(value, dict) and fields is _CONFIG and is_part:
            _check_settings(file, f"{prefix}{name}.", value, fields)


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) < _MOST_ID


def _check_lengths(file: str, field: str, tokens: Iterable[Any]) -> None:
    """Check that no token is so long that a few of them make an endless answer."""
    longest = max((len(token) for token in tokens if isinstance(token, str)), default=0)
    if longest > _MOST_WORD:
        takes = f"tokens of at most {_MOST_WORD:,} characters"
        raise BadFile(file, field, takes, f"one of {longest:,}")


def _check_ids(file: str, prefix: str, vocabulary: Mapping[str, Any]) -> None:
    numbers = vocabulary.values()
    are_ints = {*map(type, numbers)} <= {int}  # without a loop over 100,000 tokens in Python
    if are_ints and min(numbers, default=0) >= 0 and max(numbers, default=0) < _MOST_ID:
        return
    for token, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < _MOST_ID:
            field = f"{prefix}{ascii(token)[:_MOST_SHOWN]}"
            raise BadFile(file, field, "the number of a token", shown(number))


def _check_rules(rules: Mapping[str, Any]) -> None:
    """Check a tokenizer.json: its vocabulary, and that its rules cannot lengthen a text too far."""
    added = rules.get("added_tokens") or []
    if not isinstance(added, list):
        raise BadFile(_TOKENIZER, "added_tokens", "a list", shown(added))
    if len(added) > _MOST_ADDED:
        takes = f"a list of at most {_MOST_ADDED:,} tokens"
        raise BadFile(_TOKENIZER, "added_tokens", takes, shown(added))
    for place, token in enumerate(added):
        field = f"added_tokens[{place}]"
        if not isinstance(token, dict):
            raise BadFile(_TOKENIZER, field, "an object", shown(token))
        if not _is_text(token.get("content")):
            raise BadFile(_TOKENIZER, f"{field}.content", "a text", shown(token.get("content")))
        number = token.get("id")
        if type(number) is not int or not 0 <= number < _MOST_ID:
            raise BadFile(_TOKENIZER, f"{field}.id", "the number of a token", shown(number))
    _check_lengths(_TOKENIZER, "added_tokens", (token["content"] for token in added))
    model = rules.get("model")
    if not isinstance(model, dict):
        raise BadFile(_TOKENIZER, "model", "an object", shown(model))
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        _check_ids(_TOKENIZER, "model.vocab.", vocabulary)
    elif not isinstance(vocabulary, list):
        raise BadFile(_TOKENIZER, "model.vocab", "an object or a list", shown(vocabulary))
    else:
        vocabulary = [entry[0] for entry in vocabulary if isinstance(entry, list) and entry]
    _check_lengths(_TOKENIZER, "model.vocab", vocabulary)
    merges = model.get("merges", [])
    if not isinstance(merges, list):
        raise BadFile(_TOKENIZER, "model.merges", "a list", shown(merges))
    longest = model.get("max_input_chars_per_word", 1)
    if not _is_int(longest) or not 0 < longest <= _MOST_WORD:
        takes = f"a number from 1 to {_MOST_WORD:,}"
        raise BadFile(_TOKENIZER, "model.max_input_chars_per_word", takes, shown(longest))
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = model.get(name)
        if affix is not None and not (_is_text(affix) and len(affix) <= _MOST_AFFIX):
            takes = f"a text of at most {_MOST_AFFIX} characters"
            raise BadFile(_TOKENIZER, f"model.{name}", takes, shown(affix))
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = rules.get(name)
        if part is not None and not isinstance(part, dict):
            raise BadFile(_TOKENIZER, name, "an object", shown(part))
        if name == "decoder":
            for expression in expressions(part):
                if not is_usual(expression):
                    raise BadFile(
                        _TOKENIZER, name, "free of regular expressions", shown(expression)
                    )
    _check_growth(rules)


def _check_growth(rules: Mapping[str, Any]) -> None:
    """Check that the rules of a tokenizer cannot lengthen a text too far."""
    bytes_of = {name: growth(rules.get(name)) for name in ("normalizer", "pre_tokenizer")}
    for name, times, most in (
        (max(bytes_of, key=bytes_of.__getitem__), math.prod(bytes_of.values()), _MOST_GROWTH),
        ("post_processor", growth(rules.get("post_processor")), _MOST_TOKENS),
        ("decoder", growth(rules.get("decoder")), _MOST_GROWTH),
    ):
        if times > most:
            takes = f"rules that make a text at most {most:,} times as long"
            raise BadFile(_TOKENIZER, name, takes, f"{times:.3g} times")
