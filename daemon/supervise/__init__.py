"""The supervisor's side: starts Redis, zygote, workers and gateway, and replaces what dies.

`guardian` starts the supervisor again when it is killed itself. Answers requests on the control
socket, and removes old answers (`retention`). Imports no torch.
"""
