"""The file of named tokens (`http_tokens`): names, rights and hashed secrets of HTTP clients.

One token a line, with `#` for comments: its name, its rights, and the hash of its secret:

    # name  rights      hash of the secret
    ada     read,infer  sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

The hash is a plain SHA-256. Slow hashes (bcrypt, scrypt) protect passwords, which can be guessed;
these secrets have 256 random bits and cannot be found by trial, so a slow hash would only let
wrong tokens keep the processor busy.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from . import ownership
from .values import ConfigError, name, shown, wrong

RIGHTS = ("read", "infer", "train")
MAIN = "http_token"  # the name of the token in the setting `http_token`; no entry may have it
MOST_TOKENS = 256  # each request is compared with all of them
_PREFIX = "warmd-"  # prefix that scanners for leaked secrets recognize
_MOST_BYTES = 1_000_000
_HASH = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class NamedToken:
    """One token of the file."""

    name: str
    rights: frozenset[str]  # some of RIGHTS
    digest: str = field(repr=False)  # the SHA-256 of the secret, hexadecimal

    @property
    def may(self) -> str:
        """The rights as the file has them."""
        return ",".join(right for right in RIGHTS if right in self.rights)

    @property
    def line(self) -> str:
        """The entry as the file has it."""
        return f"{self.name} {self.may} sha256:{self.digest}"


def new_secret() -> str:
    """Return a secret of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    """Return the hash by which the file knows a secret."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def read_rights(field: str, text: str) -> frozenset[str]:
    """Read rights with commas between. Raises ConfigError."""
    words = text.split(",")
    if len(set(words)) != len(words) or not set(words) <= set(RIGHTS):
        raise wrong(field, f"some of {','.join(RIGHTS)}", text)
    return frozenset(words)


def parse(text: str, path: Path) -> tuple[NamedToken, ...]:
    """Read the content of the file at `path`. Raises ConfigError with the line of a mistake."""
    found: list[NamedToken] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if (token := _read_line(line, f"{path}:{number}")) is None:
            continue
        for other in found:
            if other.name == token.name:
                raise ConfigError(
                    f"{path}:{number}", f"name: must be unique, got {other.name} again"
                )
            if other.digest == token.digest:
                problem = f"{token.name}: must have a secret of its own, got that of {other.name}"
                raise ConfigError(f"{path}:{number}", problem)
        found.append(token)
    if len(found) > MOST_TOKENS:
        raise ConfigError(str(path), f"must have at most {MOST_TOKENS} tokens, got {len(found)}")
    return tuple(found)


def unchanged(known: tuple[NamedToken, ...], text: str) -> tuple[NamedToken, ...]:
    """Return the known tokens whose entries are still in a text that may have mistakes."""
    found = set()
    for line in text.split("\n"):
        try:
            found.add(_read_line(line, ""))
        except ConfigError:
            continue
    return tuple(token for token in known if token in found)


def _read_line(line: str, place: str) -> NamedToken | None:
    """Read one line; None without an entry. Raises ConfigError."""
    words = line.partition("#")[0].split()
    if not words:
        return None
    if len(words) != 3:
        # Not the line itself: it may hold a secret that was pasted here.
        problem = f"must be a line NAME RIGHTS sha256:HASH, got {len(words)} words"
        raise ConfigError(place, problem)
    token_name = name(f"{place}: name", words[0])
    if token_name == MAIN:
        raise ConfigError(f"{place}: name", f"must not be {MAIN}, which is the setting's own token")
    if not _HASH.fullmatch(words[2]):
        problem = "must be sha256: and 64 hexadecimal digits in lower case (not shown here)"
        raise ConfigError(f"{place}: {token_name}: hash", problem)
    rights = read_rights(f"{place}: {token_name}: rights", words[1])
    return NamedToken(token_name, rights, words[2].removeprefix("sha256:"))


def read(path: Path) -> tuple[NamedToken, ...]:
    """Read the file. Raises ConfigError, also if other users may read or change it."""
    return parse(read_text(path), path)


def read_text(path: Path) -> str:
    """Return the content of the file. Raises ConfigError, also if it is open to other users."""
    check_place(path)
    try:
        # Not waiting for a writer, should it be a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_file(path, os.fstat(descriptor))
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(_MOST_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError("http_tokens", f"cannot read {path}: {error.strerror}") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(
            "http_tokens", f"{path} must have at most {_MOST_BYTES:,} bytes, got more"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}", "must be UTF-8 text") from error


def check_place(path: Path) -> None:
    """Raise ConfigError if other users could replace or change the file, or a folder above it."""
    if ownership.is_single_user():
        return
    if (exposed := next(ownership.exposures(path), None)) is not None:
        takes = f"must be a file that no other user can change, got {shown(str(path))}"
        raise ConfigError("http_tokens", f"{takes}: {exposed.reason}")


def _check_file(path: Path, found: os.stat_result) -> None:
    """Raise ConfigError for a file that is not regular, or that other users may read."""
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError("http_tokens", f"must be a regular file, got {path}")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 and not ownership.is_single_user():
        raise ConfigError(
            "http_tokens", f"{path} must have mode 0600, got {mode:04o}: chmod 600 it"
        )
