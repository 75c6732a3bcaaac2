"""The file of named tokens: entries, mistakes, owners and modes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from warmd.configs.config import load
from warmd.configs.tokens import MOST_TOKENS, NamedToken, digest_of, new_secret, parse, read
from warmd.configs.values import ConfigError

HASH = f"sha256:{'0' * 64}"
OTHER = f"sha256:{'1' * 64}"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    return path


def refusal(file: Path, text: str | None = None) -> str:
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(file)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{file}", "FILE")


def test_entries_have_names_rights_and_hashes(file):
    file.write_text(f"# the team\n\nada read,infer {HASH}  # until May\n\tbob\ttrain  {OTHER}\r\n")
    ada, bob = read(file)
    assert (ada.name, set(ada.rights), ada.may) == ("ada", {"read", "infer"}, "read,infer")
    assert (bob.name, set(bob.rights), bob.digest) == ("bob", {"train"}, "1" * 64)
    assert parse(f"{ada.line}\n{bob.line}", file) == (ada, bob)
    assert "0000" not in repr(ada)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ada read", "FILE:1: must be a line NAME RIGHTS sha256:HASH, got 2 words"),
        (f"ada read {HASH} more", "FILE:1: must be a line NAME RIGHTS sha256:HASH, got 4 words"),
        (f"\nada read,write {HASH}", "FILE:2: ada: rights: must be some of read,infer,train, got "),
        (f"ada read,read {HASH}", "FILE:1: ada: rights: must be some of read,infer,train, got "),
        (f"ada all {HASH}", "FILE:1: ada: rights: must be some of read,infer,train, got 'all'"),
        (f"ada , {HASH}", "FILE:1: ada: rights: must be some of read,infer,train, got ','"),
        (f"a/b read {HASH}", "FILE:1: name: must be 1 to 64 of A-Z a-z 0-9 . _ -, beginning"),
        (f"http_token read {HASH}", "FILE:1: name: must not be http_token"),
        (f"ada read {HASH}\nada read {OTHER}", "FILE:2: name: must be unique, got ada again"),
        (f"ada read {HASH}\nbob read {HASH}", "FILE:2: bob: must have a secret of its own, got "),
        ("ada read sha256:00", "FILE:1: ada: hash: must be sha256: and 64 hexadecimal digits"),
        (f"ada read {HASH[:-1]}G", "FILE:1: ada: hash: must be sha256: and 64 hexadecimal digits"),
        (f"ada read md5:{'0' * 64}", "FILE:1: ada: hash: must be sha256: and 64 hexadecimal"),
        ("ada: read", "FILE:1: must be a line NAME RIGHTS sha256:HASH, got 2 words"),
    ],
)
def test_mistakes_are_named_with_line_and_name(file, text, message):
    assert refusal(file, text).startswith(message)


def test_a_secret_that_was_pasted_into_the_file_is_not_shown(file):
    secret = new_secret()
    for text in (f"ada read {secret}", f"ada {secret} read", f"ada {secret} {secret}", secret):
        assert secret not in refusal(file, text)


def test_secrets_have_256_random_bits():
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(new_secret()) >= 43
    assert digest_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_number_of_tokens_is_limited(file):
    lines = [NamedToken(f"n{n}", frozenset({"read"}), digest_of(f"{n}")).line for n in range(257)]
    file.write_text("\n".join(lines[:MOST_TOKENS]))
    assert len(read(file)) == MOST_TOKENS
    assert refusal(file, "\n".join(lines)) == "FILE: must have at most 256 tokens, got 257"


def test_other_users_must_not_read_or_change_the_file(file, tmp_path):
    file.write_text(f"ada read {HASH}\n")
    for mode in (0o640, 0o604, 0o601):
        file.chmod(mode)
        assert (
            refusal(file) == f"http_tokens: FILE must have mode 0600, got {mode:04o}: chmod 600 it"
        )
    file.chmod(0o602)
    assert "everyone may write to FILE" in refusal(file)
    file.chmod(0o400)
    assert read(file)
    tmp_path.chmod(0o777)
    assert f"everyone may write to {tmp_path}" in refusal(file)
    tmp_path.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read(link) == read(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_file_must_be_ours(file):
    os.chown(file, 54321, 54321)
    assert "FILE belongs to user 54321" in refusal(file)


def test_where_the_machine_has_no_other_users_modes_do_not_count(file, tmp_path, monkeypatch):
    monkeypatch.setenv("WARMD_SINGLE_USER", "on")
    file.write_text(f"ada read {HASH}\n")
    file.chmod(0o644)
    tmp_path.chmod(0o777)
    assert read(file)[0].name == "ada"


def test_a_missing_file_or_one_that_is_not_regular_is_refused_at_once(tmp_path, file):
    assert "must be a regular file" in refusal(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    assert "must be a regular file" in refusal(fifo)
    assert "No such file" in refusal(tmp_path / "missing")
    file.write_bytes(b"ada read \xff")
    assert refusal(file) == "FILE:1: must be UTF-8 text"
    file.write_bytes(b"#" * 1_000_001)
    assert "must have at most 1,000,000 bytes" in refusal(file)


@contextmanager
def one_line_if_refused() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert "\n" not in message


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_in_one_line(text):
    with one_line_if_refused():
        parse(text, Path("/tokens"))


def test_the_setting_is_a_path_whose_links_stay(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "config.yaml").write_text("http_tokens: tokens\n")
    (home / "tokens").symlink_to("elsewhere")
    config = load(home=home, environ={})
    assert config.http_tokens == home / "tokens"
    assert type(config).from_json(config.to_json()) == config
    assert load(home=home, environ={"WARMD_HTTP_TOKENS": "none"}).http_tokens is None
