"""What commands and the gateway do with jobs and with the daemon. Imports no torch, starts nothing
but the daemon itself. Specs enter; plain dicts and lists leave.
"""
