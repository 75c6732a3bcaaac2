"""The command line, `warmd`: results on stdout, notes on stderr, and an exit code.

`main` finds the command in `commands/` and formats errors; `shared/` has common options and
arguments; `view/` formats values as text. Calls `daemon.client`; imports neither torch nor
transformers.
"""
