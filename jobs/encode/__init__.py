"""The encode kind: vectors of texts, or of the modules, classes and functions of Python code.

`options` (no torch) -> `kind.run` -> `passages`, `embedder` (batches and pooling), `journal` (what
is done, so that a killed job resumes behind it).
"""
