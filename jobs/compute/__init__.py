"""GEMM on this machine: devices, threads, memory, and linear layers by precision.

Weights enter as torch tensors; callables `x (rows, in) -> y (rows, out)` leave, in the form that
was measured to be fastest on this processor. The only place for private torch operations
(`onednn`) and for warmd's own machine code (`native`, which imports nothing from here but the
cache of its code). Knows no engine, model or job kind.
"""
