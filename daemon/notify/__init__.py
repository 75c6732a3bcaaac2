"""Notifications: a process that reports ended and troubled training jobs to a command or webhook.

A child of the supervisor, so that a slow receiver delays nothing else. Imports no torch.
"""
