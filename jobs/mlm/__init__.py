"""The MLM kind: masked language modeling on text, or on Python code with its knowledge graph.

`options` (no torch) -> `kind.run` -> `corpus` (token arrays on disk, built once), `model`, and
`trainer` with an `objectives.Objective` and the `masking` of each example; `data_order` (the
examples of each step), `curve` (metrics.csv).
"""
