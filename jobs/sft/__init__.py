"""The SFT kind: supervised fine-tuning, a decoder learns to generate the rows of a file.

`options` (no torch) -> `kind.run` -> `trainer`; `dataset` reads and tokenizes rows,
`packed_trainer` computes TRL's loss without padding. Enters: records with completions, chats or
texts. Leaves: events, checkpoints and the model.
"""
