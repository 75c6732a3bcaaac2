"""The commands, one file per group, imported on first use (`COMMANDS` in cli/main.py).

A command parses its options, calls `daemon.client` and prints the result through `view`. With
--json it prints the same data as JSON lines.
"""
