"""The eval kind: how good a model is on a data set, with intervals, and whether it got better.

`options` (no torch) -> `kind.run`: `questions` reads the data set, `generation` and `likelihood`
make requests, `answers` gets their completions from the engine, `journal` keeps a line per
question, `summary` and `comparison` reduce the lines to metrics, and `report` writes them as
Markdown. `gsm8k` has the prompts and the answer extraction of lm-evaluation-harness.
"""
