"""Changes of the file of named tokens, which a running gateway notices."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ...configs import tokens
from ...configs.tokens import NamedToken
from ...configs.values import name as checked_name
from ...jobs.errors import Conflict, NotFound
from ...jobs.files.atomic import locked, write_atomic

_HEAD = "# name  rights (read, infer, train)  hash of the secret\n"


def add(path: Path, name: str, may: str) -> str:
    """Add a token with the rights `may`, such as "read,infer"; return its new secret.

    The secret is stored nowhere. Raises ConfigError, and Conflict for a name that is there.
    """
    rights = tokens.read_rights("may", may)
    if checked_name("name", name) == tokens.MAIN:
        raise Conflict(f"name: must not be {tokens.MAIN}, which is the setting's own token")
    secret = tokens.new_secret()
    entry = NamedToken(name, rights, tokens.digest_of(secret))

    def change(text: str, known: tuple[NamedToken, ...]) -> str:
        if any(token.name == name for token in known):
            raise Conflict(
                f"name: {name} is in {path}: change its rights there, or remove it first"
            )
        begin = text if not text or text.endswith("\n") else f"{text}\n"
        return f"{begin or _HEAD}{entry.line}\n"

    _change(path, change)
    return secret


def remove(path: Path, name: str) -> None:
    """Remove a token. Raises ConfigError, and NotFound for a name that is not there."""

    def change(text: str, known: tuple[NamedToken, ...]) -> str:
        if all(token.name != name for token in known):
            raise NotFound(f"name: no {name!r} in {path}")
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if line.split()[:1] != [name])

    _change(path, change)


def _change(path: Path, change: Callable[[str, tuple[NamedToken, ...]], str]) -> None:
    """Replace the file by what `change` makes of its text and its entries."""
    tokens.check_place(path)
    target = path.resolve()  # a link stays one
    with locked(target.parent):
        text = tokens.read_text(path) if os.path.lexists(target) else ""
        changed = change(text, tokens.parse(text, path))
        tokens.parse(changed, path)
        write_atomic(target, changed.encode())
