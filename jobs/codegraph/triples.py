"""Triples (head, relation, tail) of the knowledge graph of Python sources.

Entities are dotted names: a module (`json.decoder`), a definition in it
(`json.decoder.JSONDecoder`, `json.decoder.JSONDecoder.decode`), a parameter (`json.loads.s`), a
name of another module (`re.compile`), a builtin (`len`), or a bare method name (`append`) if the
class is unknown. A scope is a module, a class or a function; code belongs to the innermost scope.

relation        head                      tail
contains        package; scope            module in it; class defined directly in the scope
defines         scope                     function or method defined directly in the scope
declares        module, class; function   variable bound in its body or through `self`; parameter
imports         scope                     module or name of an import statement, made absolute
inherits_from   class                     base class
annotated_with  class, function           decorator
                variable, parameter       type in its annotation: `X` of `X[…]`, both of `X | Y`
returns         function                  type in its annotation; without one, what its return
                                          statements return: a literal's type, a callee, a global
calls           scope                     function called by its name, also `module.function(…)`
invokes         scope                     method called on an object; `Class.method` for `self`
instantiates    scope                     class called: of this file, a builtin one, or CapWords
raises          scope                     exception class of a raise statement
catches         scope                     exception class of an except clause

A relation between the same two entities counts once per file.
"""

from __future__ import annotations

from typing import NamedTuple

RELATIONS = (
    "calls",
    "returns",
    "contains",
    "imports",
    "declares",
    "defines",
    "instantiates",
    "annotated_with",
    "invokes",
    "inherits_from",
    "catches",
    "raises",
)


class Qualifiers(NamedTuple):
    """Where a triple was read."""

    language: str
    file: str  # relative to the root, with slashes
    module: str


class Triple(NamedTuple):
    """One edge of the graph."""

    head: str
    relation: str  # one of RELATIONS
    tail: str
    qualifiers: Qualifiers
