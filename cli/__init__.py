"""The command line: options in, results on stdout, notes on stderr, an exit code out."""
