"""Shared by the commands: common options and the App, the JOB argument, suggestions for typos.

`spec_options` makes options of a kind's spec, `option_values` gathers their raw values.
`target` chooses the job of a command without a JOB argument: the only candidate.
"""
