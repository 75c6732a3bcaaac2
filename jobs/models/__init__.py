"""Metadata of a model folder, without loading weights: architecture, adapter, context length,
tokenizer and chat template. Imports no torch.
"""
