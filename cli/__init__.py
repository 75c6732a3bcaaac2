"""The command line: results on stdout, notes on stderr, and an exit code."""
