"""The inference engine: one per model and precision, which batches whatever jobs ask of it.

    infer/answering.py -> Engine.submit(Generation) -> its turns: plan, forward, sample, decode
                 <- Generation.pieces (text as it comes, then the end)

One thread computes for all engines of a process, turn by turn (`compute_thread.py`).

A sequence joins and leaves the running batch at any token, and gets the tokens that it would get
alone, bit for bit: linear layers are padded to row counts whose rows do not depend on each other
(`compute/linears.py`), attention is computed per sequence and on a fixed grid of chunks
(`decoder.py`), and every sequence draws from a generator of its own (`sampling.py`).
"""
