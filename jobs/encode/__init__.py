"""The encode kind: embeddings of texts, or of the modules, classes and functions of Python code.

With a query: scores of texts by a cross-encoder.

`options` (no torch) -> `kind.run` -> `passages` (the texts to embed), `text_encoder` (tokens and
batches) with `embedder` (pooling) or `cross_encoder` (pairs with the query), `journal` (finished
vectors on disk, from which a killed job resumes). Leaves: vectors or scores in the result or in a
file.
"""
