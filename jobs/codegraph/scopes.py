"""Scopes of Python code: their syntax nodes, and the meaning of their names."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Definition: TypeAlias = Function | ast.ClassDef

BUILTINS = frozenset(dir(builtins))
BUILTIN_CLASSES = frozenset(name for name in BUILTINS if isinstance(getattr(builtins, name), type))
_LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop, ast.alias)


class Scope:
    """A module, class or function: its entity, and the meanings of names in it."""

    def __init__(self, name: str, node: ast.AST, outer: Scope | None) -> None:
        self.name = name
        self.is_class = isinstance(node, ast.ClassDef)
        self.is_function = isinstance(node, Function)
        self.outer = outer
        # Name -> entity for imports, classes and functions; None for parameters.
        self.meanings: dict[str, str | None] = {}
        self.methods: set[str] = set()  # of a class

    def owner(self) -> Scope | None:
        """The class that `self` is of."""
        scope: Scope | None = self
        while scope is not None and not scope.is_class:
            scope = scope.outer
        return scope

    def meaning(self, name: str) -> str | None:
        """The entity that a name stands for; None for a variable or a parameter."""
        scope: Scope | None = self
        while scope is not None:
            # As in Python: a function does not see the names of the class around it.
            if name in scope.meanings and (scope is self or not scope.is_class):
                return scope.meanings[name]
            scope = scope.outer
        return name if name in BUILTINS else None


def nodes_of(scope: ast.Module | Definition) -> Iterator[ast.AST]:
    """Yield the nodes of a scope in source order, without those inside inner definitions."""
    # Not recursive: expressions can be nested deeper than Python's stack.
    stack: list[ast.AST] = list(reversed(scope.body))
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Definition):  # its decorators, bases and defaults belong to this scope
            outside = [*node.decorator_list]
            if isinstance(node, ast.ClassDef):
                outside += [*node.bases, *(keyword.value for keyword in node.keywords)]
            else:
                outside += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            stack.extend(reversed(outside))
            continue
        for field in reversed(node._fields):
            value = getattr(node, field, None)
            if isinstance(value, list):
                stack.extend(
                    item
                    for item in reversed(value)
                    if isinstance(item, ast.AST) and not isinstance(item, _LEAVES)
                )
            elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
                stack.append(value)
