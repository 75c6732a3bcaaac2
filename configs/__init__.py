"""Settings of the daemon, names of queues, units, profiles of options, and the demo model.

Enters: default.yaml, the config file, WARMD_* variables, command-line options. Leaves: a checked
`DaemonConfig` (`config`). `settings` is the table of all settings; `entries` and `values` parse and
check single values. Imports nothing else of warmd.
"""
