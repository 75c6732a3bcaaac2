"""`warmd checkpoints verify --trl`: the first steps of a job, by TRL's trainer and by warmd's loop.

`options` has what both sides can compute (no torch); `rows` and `groups` prepare both `sides` of a
kind, `training` runs them, `compare` compares them. They run in a process of their own.
"""
