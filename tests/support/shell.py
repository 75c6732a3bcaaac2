"""Runs `warmd` commands in this process: fast, and with the exit code that a shell would see."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from warmd.cli.main import main

# Settings and terminal size of the developer must not affect the tests.
CLEAN_ENVIRON = {
    name: text
    for name, text in os.environ.items()
    if not name.startswith("WARMD_") and name not in {"COLUMNS", "LINES"}
}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout, one a line."""
        return [orjson.loads(line) for line in self.out.splitlines()]

    def is_refusal(self, code: int) -> bool:
        """Whether it ended with this code, no result and one line of error."""
        one_line = self.err.startswith("Error: ") and self.err.count("\n") == 1
        return self.code == code and self.out == "" and one_line and "a bug in" not in self.err


def warmd(*arguments: str, home: Path, folder: Path | None = None) -> Done:
    """Run a command for a home, in a folder."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        contextlib.chdir(folder or Path()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(["--home", str(home), *arguments])
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return Done(code, *texts)
