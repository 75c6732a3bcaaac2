"""Random numbers that depend on named fields only, never on what was drawn before.

A generator that all parts of a training share gives each part other numbers as soon as one of them
draws more or fewer. Here a digest of the fields is the key of Philox, a counter-based generator
(Salmon et al., SC 2011), and the place in its stream is the last field. A field that is added later
leaves the numbers without it as they are.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def uniform(count: int, **fields: Any) -> NDArray[np.float64]:
    """Return numbers in [0, 1): (count,), the same for the same fields."""
    found: NDArray[np.float64] = (_raw(count, fields) >> np.uint64(11)) * np.float64(2.0**-53)
    return found


def permutation(count: int, **fields: Any) -> list[int]:
    """Return the numbers from 0 to count - 1 in an order that depends on the fields."""
    order: list[int] = np.argsort(_raw(count, fields), kind="stable").tolist()
    return order


def _raw(count: int, fields: dict[str, Any]) -> NDArray[np.uint64]:
    text = "\n".join(f"{name}={value}" for name, value in sorted(fields.items()))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    # The raw numbers: numpy may change its distributions.
    numbers: NDArray[np.uint64] = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(
        count
    )
    return numbers
