"""Training on several sequences in one row of tokens: no padding, no sequence sees another.

`attention` (who sees whom, which models can be packed), `passes` (one forward and backward pass of
a pack, and how large a pack may be), `logprobs` (the vocabulary head at chosen places alone).
Knows no kind.
"""
