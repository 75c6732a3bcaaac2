"""The zygote, a process with all libraries and warm models, and the work horses that it forks.

The only package of the daemon that imports torch. A request to run a job enters on the zygote's
socket; events and the outcome leave on the connection between the horse and its worker.
"""
