"""Both clients of Cohere's SDK: reranking. Argument: the URL of the API."""
# mypy: ignore-errors

from __future__ import annotations

import sys

import cohere

url = sys.argv[1].removesuffix("/v1")
question, texts = "which number?", ["one", "number two", "and a third"]
asked = {"model": "scorer", "query": question, "documents": texts}

newer = cohere.ClientV2(api_key="unused", base_url=url).rerank(
    **asked, top_n=2, max_tokens_per_doc=512
)
older = cohere.Client(api_key="unused", base_url=url).rerank(**asked, return_documents=True)
scores = [result.relevance_score for result in older.results]
assert scores == sorted(scores, reverse=True)
assert [(r.index, r.relevance_score) for r in newer.results] == [
    (r.index, r.relevance_score) for r in older.results[:2]
]
assert sorted(result.index for result in older.results) == [0, 1, 2]
assert [result.document.text for result in older.results] == [
    texts[result.index] for result in older.results
]
assert newer.id != older.id
assert newer.meta.tokens.input_tokens == older.meta.tokens.input_tokens > 0
assert newer.meta.warnings is None
(warning,) = (
    cohere.ClientV2(api_key="unused", base_url=url)
    .rerank(**asked, max_tokens_per_doc=3)
    .meta.warnings
)
assert "2 of 3 documents" in warning, warning
refused = None
try:
    cohere.ClientV2(api_key="unused", base_url=url).rerank(**asked, priority=1)
except cohere.BadRequestError as error:
    refused = error.body["error"]["param"]
assert refused == "priority"
