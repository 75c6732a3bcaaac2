"""Benchmarks for users: warmd, a stock library on the same workload, and the hardware limit.

`works` names what is measured and `rows` runs it; both need no torch. In processes of their own
`grpo`, `mlm` and `infer` measure, each with `machine` for what processor and memory can do.
"""
