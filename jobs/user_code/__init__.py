"""User code in a job: fresh imports, forked children, error messages.

Takes `module:function`, returns the function and digests of the source files it came from.
"""
