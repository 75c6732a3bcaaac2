"""Benchmarks that a user can run: warmd's steps, a stock library's on the same work, the floor.

`works` names what is measured and `rows` runs it; both need no torch. In processes of their own
`grpo`, `mlm` and `infer` measure, each with `machine` for what processor and memory can do.
"""
