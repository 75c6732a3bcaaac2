"""The code-graph encoder: Python sources to a knowledge graph, the graph to token sequences, and a
transformer over both. Used by the kinds mlm (training) and encode (vectors).
"""
