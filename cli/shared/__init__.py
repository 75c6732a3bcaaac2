"""What commands share: common options and the App, the JOB argument, suggestions for typos.

`target` chooses the job of a command without a JOB argument: the only candidate.
"""
