"""Settings of the daemon (table, sources, checks), names of queues, units, and profiles."""
