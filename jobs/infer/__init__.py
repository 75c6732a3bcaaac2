"""The infer kind: completions of a prompt, a chat, or a file of thousands of them.

`options` (no torch) -> `kind.run` -> `answering`, which tokenizes (`tokenization`), submits to the
engine and emits the text as it is decoded; `batch_file` reads prompts from a file and writes the
answers to another, from which a killed job resumes.
"""
