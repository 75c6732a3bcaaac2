"""The task that each client does: two tools, a question about both, and what must come of it."""
# mypy: ignore-errors

from __future__ import annotations

import sys

MODEL = "tools"
QUESTION = "What is the weather in Paris, and what is 20 + 22?"
called = []


def weather(city: str) -> str:
    """Get the weather in a city."""
    called.append(("weather", {"city": city}))
    return "18 degrees"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    called.append(("add", {"a": a, "b": b}))
    return a + b


def check(answer: str, about: str) -> None:
    """Check the answer to the question, and the calls since the last check."""
    expected = [("add", {"a": 20, "b": 22}), ("weather", {"city": "Paris"})]
    assert sorted(called, key=str) == expected, (about, called)
    assert "18 degrees in Paris" in answer, (about, answer)
    assert "42" in answer, (about, answer)
    called.clear()
    sys.stdout.write(f"{about}: {answer}\n")
