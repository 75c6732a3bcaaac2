"""Inference engine with continuous batching (Orca, OSDI 2022), one per model and precision.

    infer/answering.py -> Engine.submit(Request) -> steps: admit, forward, sample, detokenize
                       <- Request.pieces (text deltas, then End)

    grpo/sampler.py -> rollouts.generate -> the same steps, by the job itself

One thread computes for all engines of a process (`compute_thread.py`).
The engine is batch-invariant: a sequence gets the same tokens alone and in a batch, bit for bit.
See `compute/batch_invariance.py` (linear layers), `span_attention.py` and `sampling.py`.
"""
