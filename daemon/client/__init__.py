"""The client of commands and gateway: operations on jobs (`client`) and the daemon (`control`).

Specs enter; plain dicts and lists leave. Each operation has its file (`submitting`, `reading`,
`steering`, `resuming`, `removing`, …); `client.Client` combines them. Imports no torch, and starts
no process except the daemon.
"""
