"""Forwarding: commands that only read run in a fork of a process that has imported them.

Imports are nearly all that such a command costs. `forward` is the client's half and imports the
standard library only; the command server (cli/command_server.py) is a process of the daemon, which
the first such command of a home has started and which ends when none came for a while; `request`
is what both know.

Without the command server, and where anything differs that a fork cannot take over (see
`request.surroundings`), a command runs in the client's own process: the same code, only slower.
"""
