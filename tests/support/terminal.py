"""Runs `warmd` on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import sys

from shell import CLEAN_ENVIRON


def seen_on_a_terminal(*arguments: str, **environ: str) -> str:
    """Run a command with more environment variables; return its output with escape sequences."""
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "warmd.cli", *arguments]
        os.execve(sys.executable, command, {**CLEAN_ENVIRON, **environ})
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # Linux: the other end is closed
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    return seen.decode()
