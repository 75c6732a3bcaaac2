"""The process that tries the rules of a tokenizer (user_code/limited_processes.py).

Imports neither torch nor transformers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from ..user_code.child_server import serve_within_limits


@lru_cache(maxsize=4)
def _tokenizer(rules: str) -> Any:
    return Tokenizer.from_str(rules)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the `error` of the rules for a text, or nothing."""
    try:
        _tokenizer(request["rules"]).encode(request["text"])
    except BaseException as error:  # a Rust panic is no Exception
        return {"error": f"{error}"}
    return {}


if __name__ == "__main__":
    serve_within_limits(_answer)
