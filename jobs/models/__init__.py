"""Metadata of a model folder, read without loading its weights.

Architecture, adapter, context length, tokenizer, chat template, and the headers of weight files.
Reads model folders; returns values and checks for submission. Imports no torch.
"""
