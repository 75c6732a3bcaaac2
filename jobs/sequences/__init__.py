"""Sequences of tokens: packed into one row without padding, scored, and their backward passes.

- `attention`: causal attention within each sequence of a pack; which models support it
- `shared_prompts`: packs of several completions behind one prompt
- `passes`: forward and backward pass over a pack; the number of tokens that fit into memory
- `lora_linear`: LoRA layers, with their frozen layer, as one autograd node
- `logprobs`: the vocabulary head at the scored tokens only

Enters: a model and packs of token ids; leaves: log-probabilities and entropies with gradients. Used
by the training kinds; imports none of them.
"""
