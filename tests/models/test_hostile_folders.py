"""Damaged and malicious model folders are refused at once, in one line with file and field.

Each case is loaded as the zygote does, and submitted as a client does.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from warmd.configs.config import DaemonConfig, ModelConfig
from warmd.daemon.client.client import Client
from warmd.daemon.fork.models import WarmModels
from warmd.jobs import spec_class
from warmd.jobs.errors import JobFailed, SpecError, WarmdError
from warmd.jobs.mlm.options import read_architecture
from warmd.jobs.models.folder_checks import check_folder
from warmd.jobs.models.folder_files import BadFile, read_json
from warmd.jobs.models.weight_headers import header

Change = Callable[[Path], Any]
_LONGEST_S = 5.0  # of a refusal, on a busy machine; a pipe would wait for ever


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "model"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "model"))


def load(folder: Path) -> None:
    WarmModels(10**10).ensure(ModelConfig(name="it", path=str(folder)), folder, in_use=[])


def check(folder: Path, home: Path) -> None:
    values = {"prompt": "1", "model": str(folder), "max_tokens": 4}
    Client(DaemonConfig(home=home)).jobs.check(spec_class("infer").parse(values))


def changed(file: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | values))

    return change


def written(file: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).write_bytes(content)

    return change


def made(file: str, make: Callable[[Path], Any]) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return change


def a_socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # a socket's path has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def weights(entries: Any, num_bytes: int = 8) -> Change:
    content = json.dumps(entries).encode()
    return written(
        "model.safetensors", struct.pack("<Q", len(content)) + content + b"\0" * num_bytes
    )


def tensor(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


NOT_REGULAR = {
    "a named pipe": os.mkfifo,
    "a socket": a_socket,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link that cannot be followed: No such file or directory": lambda path: path.symlink_to(
        "nowhere"
    ),
    "a link that cannot be followed: Too many levels of symbolic links": lambda path: (
        path.symlink_to(path.name)
    ),
}


@pytest.mark.parametrize("kind", NOT_REGULAR)
@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "tokenizer.json", "chat_template.jinja", "generation_config.json"],
)
def test_what_is_no_regular_file_is_refused_at_once(folder, tmp_path, file, kind):
    made(file, NOT_REGULAR[kind])(folder)
    begun = time.monotonic()
    for act in (lambda: load(folder), lambda: check(folder, tmp_path / "home")):
        with pytest.raises(WarmdError, match=f"{file}: must be a regular file, got {kind}"):
            act()
    assert time.monotonic() - begun < _LONGEST_S


def test_a_link_to_a_regular_file_is_loaded_as_the_cache_of_a_hub_consists_of_them(
    folder, tmp_path
):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, path in enumerate(list(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    load(folder)
    check(folder, tmp_path / "home")


SETTINGS: dict[str, tuple[Change, str]] = {
    "positions": (
        changed("config.json", max_position_embeddings="4096"),
        "config.json: max_position_embeddings must be an integer above 0, got '4096'",
    ),
    "end tokens": (
        changed("config.json", eos_token_id=[1, "2"]),
        "config.json: eos_token_id must be the number of a token, or a list of them",
    ),
    "part": (
        changed("config.json", text_config={"hidden_size": "x"}),
        "config.json: text_config.hidden_size must be an integer above 0, or a list of them",
    ),
    "any number": (
        changed("config.json", rms_norm_eps="1"),
        "config.json: rms_norm_eps must be a number, or numbers, got '1'",
    ),
    "flag": (
        changed("config.json", tie_word_embeddings="no"),
        "config.json: tie_word_embeddings must be true or false, got 'no'",
    ),
    "architectures": (
        changed("config.json", architectures="Llama"),
        "config.json: architectures must be a list of texts, got 'Llama'",
    ),
    "no object": (written("config.json", b"[]"), "config.json: must be a JSON object, got a list"),
    "nested": (
        written("config.json", b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
        "config.json: must be JSON, got text that is not",
    ),
    "cut": (written("generation_config.json", b'{"a": 1'), "generation_config.json: must be JSON"),
    "generation": (
        changed("generation_config.json", temperature="hot"),
        "generation_config.json: temperature must be a number, got 'hot'",
    ),
    "beams": (
        changed("generation_config.json", num_beams="x"),
        "generation_config.json: num_beams must be a number, or numbers, got 'x'",
    ),
    "end tokens of generation": (
        changed("generation_config.json", eos_token_id={"a": 1}),
        "generation_config.json: eos_token_id must be the number of a token",
    ),
    "template": (
        changed("tokenizer_config.json", chat_template=5),
        "tokenizer_config.json: chat_template must be a text",
    ),
    "surrogate": (
        written("tokenizer_config.json", b'{"chat_template": "\\ud800"}'),
        "tokenizer_config.json: must be JSON, got text that is not: no low surrogate",
    ),
    "template file": (
        written("chat_template.jinja", b"\xed\xa0\x80"),
        "chat_template.jinja: must be UTF-8, got byte 0",
    ),
    "special token": (
        changed("tokenizer_config.json", eos_token=[1]),
        "tokenizer_config.json: eos_token must be a text, or an object",
    ),
    "images": (
        changed("preprocessor_config.json", size={"shortest_edge": "56"}),
        "preprocessor_config.json: size must be a number, or numbers",
    ),
    "index without shards": (
        made(
            "model.safetensors",
            lambda path: (path.parent / f"{path.name}.index.json").write_text('{"weight_map": {}}'),
        ),
        "model.safetensors.index.json: weight_map must be an object with the file of each tensor",
    ),
    "shard elsewhere": (
        made(
            "model.safetensors",
            lambda path: (path.parent / f"{path.name}.index.json").write_text(
                '{"weight_map": {"a": "../a.safetensors"}}'
            ),
        ),
        r"model.safetensors.index.json: weight_map.a must be the name of a file, got '../a",
    ),
    "header list": (weights([1]), "model.safetensors: the header must be an object, got a list"),
    "header null": (weights({"a": None}), "model.safetensors: a must be an object, got null"),
    "shape": (
        weights({"a": tensor(["2"])}),
        "model.safetensors: a.shape must be a list of numbers",
    ),
    "flags": (weights({"a": tensor([True])}), "model.safetensors: a.shape must be a list"),
    "negative": (weights({"a": tensor(offsets=(-8, 0))}), "a.data_offsets must be two numbers"),
    "null offset": (
        weights({"a": tensor(offsets=(0, None))}),
        "a.data_offsets must be two numbers",
    ),
    "dtype": (weights({"a": tensor(dtype=32)}), r"a.dtype must be one of .*F32.*, got 32"),
    "size": (weights({"a": tensor([3])}), "a.data_offsets must be 12 bytes apart"),
    "huge": (weights({"a": tensor([2**62, 2**62])}), "a.data_offsets must be .* bytes apart"),
    "overlap": (
        weights({"a": tensor(), "b": tensor(offsets=(4, 12))}, 12),
        "b.data_offsets must be from 8, where the tensor before ends",
    ),
    "truncated": (
        weights({"a": tensor()}, 4),
        "model.safetensors: must be a file with 8 bytes of tensors, by its header, got 4",
    ),
    "metadata": (weights({"__metadata__": {"a": 1}}), "__metadata__ must be an object with texts"),
    "header beyond the file": (
        written("model.safetensors", struct.pack("<Q", 2**63) + b"{}"),
        "model.safetensors: the length of the header must be at most 2",
    ),
    "many tensors": (
        weights({str(n): tensor([0], [0, 0]) for n in range(200_001)}, 0),
        "model.safetensors: the header must be of at most 200,000 tensors, got 200,002",
    ),
    "labels": (
        changed("config.json", num_labels=10**9),
        "config.json: num_labels must be a number from 0 to 1,000,000, got 1000000000",
    ),
    "empty": (written("model.safetensors", b""), "model.safetensors: must be a safetensors file"),
    "pointer": (
        written("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0"),
        "model.safetensors: must be the file itself, got a pointer of Git LFS",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_wrong_in_a_model_folder_is_named_by_file_and_field(folder, tmp_path, name):
    change, problem = SETTINGS[name]
    change(folder)
    for act in (lambda: load(folder), lambda: check(folder, tmp_path / "home")):
        with pytest.raises(WarmdError, match=problem) as raised:
            act()
        assert "\n" not in str(raised.value)
        assert "bug in warmd" not in str(raised.value)


_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": None}, "tokenizer.json: model must be an object, got null"),
    "ids": ({"model": {"type": "BPE", "vocab": {"a": "0"}}}, "model.vocab.'a' must be the number"),
    "negative": ({"model": {"type": "BPE", "vocab": {"a": -1}}}, "model.vocab.'a' must be the"),
    "added": ({"added_tokens": [{"id": 0}]}, r"added_tokens\[0\].content must be a text, got null"),
    "many added": (
        {"added_tokens": [{"id": n, "content": str(n)} for n in range(100_001)]},
        r"added_tokens must be a list of at most 100,000 tokens, got a list \(100001 entries\)",
    ),
    "rules": ({"normalizer": "NFC"}, "tokenizer.json: normalizer must be an object, got 'NFC'"),
    "unknown rules": ({"normalizer": {"type": "Nope"}}, "its tokenizer must be one that"),
    "long words": (
        {"model": {"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": 10**9}},
        "model.max_input_chars_per_word must be a number from 1 to 10,000, got 1000000000",
    ),
    "long token": (
        {"model": {"type": "BPE", "vocab": {"x" * 10_001: 0}, "merges": []}},
        "model.vocab must be tokens of at most 10,000 characters, got one of 10,001",
    ),
    "long scored token": (
        {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["x" * 10_001, 0.0]]}},
        "model.vocab must be tokens of at most 10,000 characters, got one of 10,001",
    ),
    "long added token": (
        {"added_tokens": [{"id": 0, "content": "x" * 10_001}]},
        "added_tokens must be tokens of at most 10,000 characters, got one of 10,001",
    ),
    "long affix": (
        {"model": {"type": "WordPiece", "vocab": {}, "continuing_subword_prefix": "#" * 10**6}},
        "model.continuing_subword_prefix must be a text of at most 100 characters",
    ),
    "prepended": (
        {"normalizer": {"type": "Prepend", "prepend": "x" * 10**7}},
        r"normalizer must be rules that make a text at most 1,000 times as long, got 1e\+07 times",
    ),
    "repeated": (
        {"post_processor": {"type": "TemplateProcessing", "single": [_TEXT] * 100_000, "pair": []}},
        r"post_processor must be rules that make a text at most 16 times as long, got 1e\+05 times",
    ),
    "growth": (
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
                ]
                * 9,
            }
        },
        r"normalizer must be rules that make a text at most 1,000 times as long, got 1e\+09",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_wrong_in_a_tokenizer_is_named_by_field(folder, name):
    values, problem = TOKENIZERS[name]
    changed("tokenizer.json", **values)(folder)
    with pytest.raises(JobFailed, match=problem):
        load(folder)


class Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("run",)


def saved(content: Any, **options: Any) -> Change:
    return made("pytorch_model.bin", lambda path: torch.save(content, path, **options))


def compressed(folder: Path) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (64 << 20))


PICKLES: dict[str, tuple[Change, str]] = {
    "text": (written("pytorch_model.bin", b"no file of torch"), "got something else"),
    "empty": (written("pytorch_model.bin", b""), "got something else"),
    "pickle": (written("pytorch_model.bin", pickle.dumps({"a": 1})), "got something else"),
    "compressed": (compressed, "got a compressed archive"),
    "list": (saved([1]), "got 'list'"),
    "values": (saved({"a": 1}), r"pytorch_model.bin: a must be a tensor, got 'int'"),
    "code": (saved({"a": Code()}), r"got code \(posix.mkdir\), which is not run"),
    "old code": (
        saved({"a": Code()}, _use_new_zipfile_serialization=False),
        r"got code \(posix.mkdir\), which is not run",
    ),
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickled_weights_hold_tensors_only_and_no_advice_to_run_them_is_passed_on(
    folder, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    change, problem = PICKLES[name]
    (folder / "model.safetensors").unlink()
    change(folder)
    with pytest.raises(JobFailed, match=problem) as raised:
        load(folder)
    assert "weights_only" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickled_weights_are_loaded_in_both_formats(folder, is_zip):
    (folder / "model.safetensors").unlink()
    content = tiny.model().state_dict()
    torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    load(folder)


def test_a_field_that_only_the_class_of_the_model_knows_is_named_when_it_is_loaded(folder):
    changed("config.json", mlp_bias="yes")(folder)
    with pytest.raises(JobFailed, match=r"config\.json: mlp_bias must be bool, got 'yes'"):
        load(folder)


def test_a_header_as_the_library_writes_it_is_taken(folder):
    found = header(folder / "model.safetensors")
    assert all(entry["dtype"] == "F32" for entry in found.values())
    check_folder(folder)


def test_the_settings_of_a_new_model_are_checked_too(folder):
    changed("config.json", hidden_size="64")(folder)
    for path in (folder, folder / "config.json"):
        with pytest.raises(SpecError, match=r"architecture: .*config\.json: hidden_size must be"):
            read_architecture(str(path))
    made("config.json", os.mkfifo)(folder)
    with pytest.raises(SpecError, match=r"config\.json: must be a regular file, got a named pipe"):
        read_architecture(str(folder / "config.json"))


def test_a_file_that_is_refused_is_closed(folder):
    before = len(os.listdir("/proc/self/fd"))
    for place in (folder, Path("/dev/zero")):
        with pytest.raises(BadFile, match="must be a regular file"):
            read_json(place)
    assert len(os.listdir("/proc/self/fd")) == before


def test_infinity_is_taken_in_settings_as_published_models_have_it(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"time_step_limit": [0.0, Infinity],', 1))
    check_folder(folder)
    load(folder)
    path.write_text(path.read_text().replace("Infinity", "Infinity" + "[" * 100_000))
    with pytest.raises(BadFile, match=r"config\.json: must be JSON"):
        check_folder(folder)


ADAPTERS: dict[str, dict[str, Any]] = {
    "repeated group": {"target_modules": "(.+)+x"},
    "repeated group, verbose": {"target_modules": "(?x)(.+) +x"},
    "alternatives": {"exclude_modules": "(a|a)*b"},
    "many loops": {"target_modules": ".*.*.*.*x"},
    "reference": {"layers_pattern": [r"(a)\1"]},
    "names": {"rank_pattern": {"(.+)+x": 4}},
    "many names": {"alpha_pattern": {f".*{n}": 4 for n in range(4)}},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_expression_of_an_adapter_that_could_take_hours_is_refused(tmp_path, name):
    changed("adapter_config.json", **ADAPTERS[name])(tmp_path)
    (field,) = ADAPTERS[name]
    with pytest.raises(BadFile, match=rf"adapter_config\.json: {field} must be .*repeated groups"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    "expression",
    [
        "all-linear",
        r".*\.(q|k|v|o)_proj$",
        r"^(?!.*(vision|visual)).*layers\.\d+\.(self_attn|mlp)\.(?:q_proj|up_proj)",
        r"model\.layers\.(1[0-9]|2[*+{(]?)\.mlp",
        ["q_proj", "(.+)+x"],  # names, not expressions
    ],
)
def test_expressions_as_adapters_have_them_are_taken(tmp_path, expression):
    changed("adapter_config.json", target_modules=expression)(tmp_path)
    check_folder(tmp_path)
