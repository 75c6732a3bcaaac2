"""The zygote (a process with all libraries and warm models) and the work horses that it forks.

The only package of the daemon that imports torch. Enters: requests to run jobs, on the zygote's
socket. Leaves: events and the outcome of each job, from the horse to its worker over the connection
between them. `zygote` forks, `models` holds the warm models, `execution` runs a job in the horse.
"""
