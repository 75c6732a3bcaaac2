"""Benchmarks: warmd, a stock library on the same workload, and the limit of the hardware.

`works` defines the workloads; `rows` runs them and returns the rows of the table (no torch).
`grpo`, `sft`, `mlm` and `infer` measure, each in a process of its own, with a synthetic `model`;
`machine` measures GEMM throughput and memory bandwidth, the limits.
"""
