"""Metadata of a model folder, read without loading its weights.

Architecture, adapter, context length, tokenizer, chat template, and the headers of weight files.
What enters is a folder; what leaves are values and checks at submission. Imports no torch.
"""
