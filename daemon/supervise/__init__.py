"""The supervisor: starts Redis, zygote, workers and gateway, and restarts those that die.

`guardian` restarts the supervisor itself. Enters: the settings, and requests on the control socket
(stop, reload, load, unload, status). Leaves: running processes, and their state. The supervisor
also requeues orphaned jobs and removes old answers (`retention`). Imports no torch.
"""
