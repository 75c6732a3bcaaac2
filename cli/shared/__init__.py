"""Shared by the commands: common options and the App, the JOB argument, suggestions for typos.

`spec_options` makes command-line options from the spec of a kind, `option_values` gathers their raw
values, which `Spec.parse` checks. `target` chooses the job of a command without a JOB argument: the
only candidate. Knows no command.
"""
