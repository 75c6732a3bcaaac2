"""Settings of the daemon: their table, where they come from, how values are checked; profiles."""
