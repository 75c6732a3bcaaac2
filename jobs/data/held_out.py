"""The held-out split: which items of a data set a job trains on, and which it is evaluated on.

Two rules, for all kinds: by position (records, prompts) and by content (documents). A resumed job
holds out the same items as before, so neither rule may change.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


def split(items: Iterable[Item], samples: int | None, held_out: int) -> Iterator[tuple[Item, bool]]:
    """Yield the items that a job uses, in order, each with whether it is held out.

    The first `samples` are trained on, and the `held_out` items after them are held out; what
    follows is not read. None: all items but the last `held_out` are trained on.
    """
    if samples is not None:
        for number, item in enumerate(islice(items, samples + held_out)):
            yield item, number >= samples
        return
    latest: deque[Item] = deque()
    for item in items:
        latest.append(item)
        if len(latest) > held_out:
            yield latest.popleft(), False
    yield from ((item, True) for item in latest)


def digest(content: str | bytes) -> int:
    """Return a 64-bit hash of a document."""
    content = content.encode(errors="replace") if isinstance(content, str) else content
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def split_by_content(digests: Iterable[int], share: float) -> frozenset[int]:
    """Return the digests of the documents to hold out: a fraction of the distinct ones.

    Equal documents are on the same side. At least one is held out when `share` > 0 and there are
    two, and at least one is left for training.
    """
    different = sorted(set(digests))
    count = min(max(round(share * len(different)), int(share > 0)), len(different) - 1)
    return frozenset(different[: max(count, 0)])
