"""The SFT kind: supervised fine-tuning, a decoder learns to generate the rows of a file.

`options` (no torch) -> `kind.run` -> `task`; `dataset` reads and tokenizes rows.
Enters: records with completions, chats or texts.
Leaves: events, checkpoints and the model.
"""
