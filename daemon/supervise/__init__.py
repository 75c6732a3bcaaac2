"""The supervisor: starts Redis, zygote, workers and gateway, and restarts those that die.

`guardian` restarts the supervisor itself. The supervisor replies to requests on the control socket
(stop, reload, load, unload, status), requeues orphaned jobs and removes old answers (`retention`).
Imports no torch.
"""
