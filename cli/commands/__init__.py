"""One file for each group of commands, imported when one of them is used (cli/main.py)."""
