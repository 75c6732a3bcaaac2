"""Inference engine with continuous batching (Orca, OSDI 2022), one per model and precision.

    infer/answering.py -> Engine.submit(Request) -> steps: admit, forward, sample, detokenize
                       <- Request.pieces (text deltas, then End)

One thread computes for all engines of a process, one scheduler step at a time
(`compute_thread.py`).

The engine is batch-invariant: a sequence joins and leaves the running batch at any token and gets
the same tokens as alone, bit for bit. Linear layers are padded to row counts that their kernels
compute batch-invariantly (`compute/batch_invariance.py`), attention is computed per sequence and on
a fixed grid of chunks (`span_attention.py`), and each sequence has its own random generator
(`sampling.py`).
"""
