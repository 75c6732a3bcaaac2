"""Sequences of tokens with weights: divided into passes of a model, scored, and learned.

- `sequence`: a sequence, its tokens and the weight of each in a loss
- `packs`: several sequences in one row of tokens, without padding; `attention`: within each of them
- `padded`: batches of models that cannot be packed; `padding`: whether they have a padding token
- `scoring`: log-probabilities and entropies of sequences by either, with gradients, in tables
- `passes`: forward and backward pass over a pack; the number of tokens that fit into memory
- `logprobs`: the vocabulary head at the scored tokens only; `lora_linear`: LoRA layers as one node

Enters: a model and sequences; leaves: log-probabilities and entropies with gradients. Used by the
training kinds; imports none of them.
"""
