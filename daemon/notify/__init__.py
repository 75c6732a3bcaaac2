"""Notifications: a process that reports ended and troubled training jobs to a command or webhook.

Enters: the events of training jobs, read from their run directories (`scanner`). Leaves: one
notification per event (`delivery`), also after a crash. A child of the supervisor, so that a slow
receiver delays nothing else. Imports no torch.
"""
