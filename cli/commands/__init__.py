"""The commands, one file per group, imported on first use (`COMMANDS` in cli/main.py).

Arguments of the command line enter. A command parses its options, calls `daemon.client` and prints
the result through `view`; with --json it prints the same data as JSON lines.
"""
