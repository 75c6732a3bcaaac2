"""GGUF files, which llama.cpp and programs that contain it read (Ollama, LM Studio).

Enters: the folder of a model or of an adapter. Leaves: one file with hyperparameters, tokenizer,
chat template and tensors, and a Modelfile for Ollama. What llama.cpp would compute differently is
refused by name, or named in a note. Needs the package `gguf` (the extra of the same name), no torch
and no transformers.
"""
