"""The eval kind: metrics of a model on a data set, with intervals, and comparison with another.

`options` (no torch) -> `kind.run`: `questions` reads the data set, `generation` and `likelihood`
make requests, `answers` gets completions from the engine, `journal` keeps a line per question,
`summary` reduces the lines to metrics and comparisons, `report` writes them as Markdown. `gsm8k`
has the prompts and the answer extraction of lm-evaluation-harness.
"""
