"""What a model folder says without loading its weights: architecture, adapter, context length,
tokenizer and chat template. Imports no torch.
"""
