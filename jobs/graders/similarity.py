"""Metrics of text similarity, from 0 to 1: fuzzy_match, BLEU, GLEU and ROUGE.

Words are runs of letters, digits and underscores, in lower case.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial

_WORD = re.compile(r"\w+")
_ORDERS = range(1, 5)  # n of the n-grams of BLEU and GLEU


def fuzzy_match(text: str, reference: str) -> float:
    """Return the indel similarity of characters: 2 · LCS / (both lengths), as rapidfuzz's ratio."""
    total = len(text) + len(reference)
    return 2 * lcs(text, reference) / total if total else 1.0


def bleu(text: str, reference: str) -> float:
    """Return sentence BLEU of up to 4-grams; 1 is added to the counts from 2-grams on.

    (Lin and Och, 2004: ORANGE.)
    """
    words, wanted = _words(text), _words(reference)
    if not words or not wanted:
        return float(words == wanted)
    logs = 0.0
    for order in _ORDERS:
        found, total = _overlap(words, wanted, order), max(len(words) - order + 1, 0)
        added = int(order > 1)
        if found + added == 0:
            return 0.0
        logs += math.log((found + added) / (total + added))
    brevity = min(1.0, math.exp(1 - len(wanted) / len(words)))
    return brevity * math.exp(logs / len(_ORDERS))


def gleu(text: str, reference: str) -> float:
    """Return Google's BLEU: the smaller one of precision and recall of all 1- to 4-grams."""
    words, wanted = _words(text), _words(reference)
    if not words or not wanted:
        return float(words == wanted)
    found = sum(_overlap(words, wanted, order) for order in _ORDERS)
    most = max(len(_all_ngrams(words)), len(_all_ngrams(wanted)))
    return found / most


def rouge_n(order: int, text: str, reference: str) -> float:
    """Return ROUGE-N: F1 of the n-grams."""
    words, wanted = _words(text), _words(reference)
    total = max(len(words) - order + 1, 0) + max(len(wanted) - order + 1, 0)
    return 2 * _overlap(words, wanted, order) / total if total else 0.0


def rouge_l(text: str, reference: str) -> float:
    """Return ROUGE-L: F1 of the longest common subsequence of words."""
    words, wanted = _words(text), _words(reference)
    total = len(words) + len(wanted)
    return 2 * lcs(words, wanted) / total if total else 0.0


METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    **{f"rouge_{order}": partial(rouge_n, order) for order in range(1, 6)},
    "rouge_l": rouge_l,
}
# OpenAI's metrics that need more than the texts, and what they need.
REFUSED = {"cosine": "an embedding model", "meteor": "a dictionary of synonyms"}


def lcs(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence (bit-parallel: Hyyrö, 2004)."""
    places: dict[Hashable, int] = {}
    for index, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << index
    whole = (1 << len(one)) - 1
    row = whole
    for item in other:
        matches = row & places.get(item, 0)
        row = (row + matches | row - matches) & whole
    return len(one) - row.bit_count()


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _ngrams(words: Sequence[str], order: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + order]) for i in range(len(words) - order + 1)]


def _all_ngrams(words: Sequence[str]) -> list[tuple[str, ...]]:
    return [ngram for order in _ORDERS for ngram in _ngrams(words, order)]


def _overlap(words: Sequence[str], wanted: Sequence[str], order: int) -> int:
    """Return the clipped number of common n-grams: each counts with the smaller of both counts."""
    return (Counter(_ngrams(words, order)) & Counter(_ngrams(wanted, order))).total()
