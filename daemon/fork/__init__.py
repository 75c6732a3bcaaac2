"""The zygote's side: every library and warm model in one process, and the horses it forks.

The only package of the daemon that imports torch. A request to run a job enters on the zygote's
socket; events and the outcome leave through the horse's line to its worker.
"""
