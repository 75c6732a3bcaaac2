"""Settings of the daemon, names of queues, units, profiles of options, and the demo model.

`settings` is the table of all settings; `config` merges defaults, file, environment and options to
a `DaemonConfig`; `entries` and `values` parse and check. Imports nothing else of warmd.
"""
