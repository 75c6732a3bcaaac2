"""Shared by commands: common options, the JOB argument, the default job, suggestions."""
