"""The command line: results on stdout, notes on stderr, and an exit code.

`main` finds the command in `commands/` and formats errors; `shared/` has common options and
arguments; `view/` turns values into text. Imports neither torch nor transformers.
"""
