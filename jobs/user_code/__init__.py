"""Code of the user's own in a job: importing it afresh, what forks of it do, its error texts.

Rewards enter as `module:function`; functions leave, with digests of the sources they came from.
"""
