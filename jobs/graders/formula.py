"""Formulas of `multi` graders: arithmetic on the scores of other graders, and nothing else.

A formula is read by Python's parser and computed from its tree: it cannot call or name anything
that is not listed here.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import JobFailed, SpecError

MOST_CHARACTERS = 1000
MOST_OPERATIONS = 200
FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_BINARY: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
_UNARY: dict[type[ast.AST], Callable[[float], float]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Formula:
    """A formula of names, numbers, + - * / ^, parentheses and FUNCTIONS."""

    def __init__(self, option: str, field: str, text: Any, names: Collection[str]) -> None:
        """Raises SpecError for a formula that uses anything else."""
        takes = f"{field} must be a formula of {', '.join(names)}"
        if not isinstance(text, str) or not 0 < len(text) <= MOST_CHARACTERS or "**" in text:
            raise SpecError(option, f"{takes} in at most {MOST_CHARACTERS} characters")
        try:
            # In Python, ^ has a lower precedence than +.
            self._tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise SpecError(option, f"{takes}, got {text[:80]!r}") from None
        if sum(1 for _ in ast.walk(self._tree)) > 3 * MOST_OPERATIONS:
            raise SpecError(option, f"{takes} of at most {MOST_OPERATIONS} operations")
        nodes = list(ast.walk(self._tree))
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        wrong = next((n for n in nodes if n not in called and not _is_known(n, names)), None)
        if wrong is not None:
            got = ast.unparse(wrong) if isinstance(wrong, ast.expr) else text
            raise SpecError(option, f"{takes} with + - * / ^ and {_functions()}, got {got[:80]!r}")
        self._text = text

    def __call__(self, scores: Mapping[str, float]) -> float:
        """Return the value for the scores by name. Raises JobFailed if it is undefined."""
        try:
            found = float(_value(self._tree, scores))
        except (ArithmeticError, ValueError, TypeError) as error:
            raise JobFailed(f"grader: {self._text}: {error} with {dict(scores)}") from None
        if not math.isfinite(found):
            raise JobFailed(f"grader: {self._text}: is {found} with {dict(scores)}")
        return found


def _functions() -> str:
    return ", ".join(FUNCTIONS)


def _is_known(node: ast.AST, names: Collection[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Call):
        is_function = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        return is_function and bool(node.args) and not node.keywords
    if isinstance(node, ast.BinOp):
        return type(node.op) in _BINARY
    if isinstance(node, ast.UnaryOp):
        return type(node.op) in _UNARY
    return isinstance(node, ast.expr_context | ast.operator | ast.unaryop)


def _value(node: ast.AST, scores: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return scores[node.id]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, scores), _value(node.right, scores))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, scores))
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return FUNCTIONS[node.func.id](*(_value(argument, scores) for argument in node.args))
