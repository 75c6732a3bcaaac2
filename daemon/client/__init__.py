"""The API of commands and gateway: operations on jobs (`client`) and on the daemon (`control`).

Specs enter; plain dicts and lists leave. Each operation has its file (`submitting`, `reading`,
`steering`, `resuming`, `removing`); `client.Client` joins them. Imports no torch, and starts no
process except the daemon.
"""
