"""The program `warmd`: passes a command to the command server, or runs it in this process."""

from __future__ import annotations

import sys

from .warm.forward import run


def main() -> int:
    """Run the command line of this process and return its exit code."""
    return run(sys.argv[1:], _run_here)


def _run_here() -> int:
    from .main import main as run_command

    return run_command()
