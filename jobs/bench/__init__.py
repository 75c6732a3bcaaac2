"""Benchmarks: warmd, a stock library on the same workload, and the limit of the hardware.

`works` defines the workloads; `rows` runs them and returns the rows of the table (no torch).
`grpo`, `sft`, `dpo`, `mlm` and `infer` measure, each in its own process, with a synthetic `model`;
`machine` measures GEMM throughput and memory bandwidth; `floor` computes the least time of a step
from them.
"""
