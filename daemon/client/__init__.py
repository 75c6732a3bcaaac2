"""The client of commands and gateway: operations on jobs (`client`) and the daemon (`control`).

Specs enter; plain dicts and lists leave. What they do has a file each (`reader`, `submitting`,
`sweeping`, `curricula`, `grouping`); `client.Client` combines them. Imports no torch, and starts no
process except the daemon.
"""
