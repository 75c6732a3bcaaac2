"""The zygote (a process with all libraries and warm models) and the work horses that it forks.

The only package of the daemon that imports torch. The zygote's socket receives requests to run
jobs; the horse sends events and the outcome to its worker over the connection between them.
"""
