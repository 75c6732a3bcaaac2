"""Metadata of a model folder, read without loading its weights.

Enters: the path of a folder. Leaves: architecture, adapter, context length, tokenizer, chat
template and the headers of weight files, and checks of all files (`folder_checks`). Needs torch
only for loaded models (`context_length`, `pickled_weights`, and the functions of `adapters` that
attach and merge).
"""
