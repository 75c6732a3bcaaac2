"""The API of commands and gateway: operations on jobs (`client`) and on the daemon (`control`).

Specs enter; plain dicts and lists leave. Imports no torch, and starts no process but the daemon.
"""
