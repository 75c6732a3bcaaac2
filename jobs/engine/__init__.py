"""The inference engine: one thread per model that batches whatever its jobs ask for.

    answering.py -> Engine.submit(Generation) -> the engine's thread: plan, forward, sample, decode
                 <- Generation.pieces (text as it comes, then the end)

A sequence joins and leaves the running batch at any token, and gets the tokens that it would get
alone, bit for bit: linear layers are padded to row counts whose rows do not depend on each other
(`linears.py`), attention is computed per sequence and on a fixed grid of chunks (`decoder.py`),
and every sequence draws from a generator of its own (`sampling.py`).
"""
