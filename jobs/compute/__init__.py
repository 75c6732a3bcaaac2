"""How this machine multiplies matrices: devices, threads, memory, linear layers by precision.

Weights enter as torch tensors; callables `x (rows, in) -> y (rows, out)` leave, in the form that
was measured to be fastest on this processor. The only place for private operations of torch
(`onednn`) and for machine code of our own (`native`). Knows no engine, no model and no job kind.
"""
