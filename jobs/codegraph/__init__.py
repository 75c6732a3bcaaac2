"""The code-graph encoder: a transformer over Python code and its knowledge graph.

- `python_graph`: Python sources to triples (head, relation, tail), from their syntax trees
- `sequences`: triples and code to token sequences
- `encoder`: the model, with its losses

Used by the kinds mlm (training) and encode (embeddings).
"""
