"""The encode kind: embeddings of texts, or of the modules, classes and functions of Python code.

`options` (no torch) -> `kind.run` -> `passages` (the texts to embed), `embedder` (batches and
pooling), `journal` (finished vectors on disk, from which a killed job resumes). Leaves: vectors in
the result or in a file.
"""
