"""The client of commands, programs and the gateway: a home's jobs, and requests to its daemon.

`client.Client` is a connection with a part for jobs, groups, nodes and models; `control` has the
requests to the daemon. Specs enter; plain dicts and lists leave. Imports no torch, and starts no
process except the daemon.
"""
