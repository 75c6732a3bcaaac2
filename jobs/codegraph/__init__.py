"""The code-graph encoder: a transformer over Python code and its knowledge graph.

- `python_graph`: a folder of Python sources to triples (head, relation, tail), which `triples`
  defines; `syntax_reader` reads one file, `scopes` resolves its names
- `sequences`: triples and code to token sequences
- `encoder`: the model, with its losses

Used by the kinds mlm (training) and encode (embeddings).
"""
