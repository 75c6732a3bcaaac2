"""Triples (head, relation, tail) of the knowledge graph of Python sources, and their JSONL files.

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

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ..data.formats import records_of
from ..files import jsonl
from ..files.jsonl import Place

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


def write_triples(triples: Iterable[Triple], path: Path) -> None:
    """Write triples as JSONL: `{"head", "relation", "tail", "qualifiers": {…}}`."""
    with path.open("wb") as file:
        for triple in triples:
            record = triple._asdict() | {"qualifiers": triple.qualifiers._asdict()}
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


def read_triples(path: Path) -> Iterator[Triple]:
    """Yield the triples of a file of records. Raises SpecError that names the invalid line."""
    for record in records_of("triples", path):
        yield _triple(record.parse(), record.place)


def _triple(record: Mapping[str, Any], place: Place) -> Triple:
    qualifiers = record.get("qualifiers")
    if not isinstance(qualifiers, dict) or not {"head", "relation", "tail"} <= record.keys():
        takes = "an object with head, relation, tail and qualifiers"
        raise place.fault(takes, jsonl.keys_of(dict(record)))
    head, relation, tail = (_name(record, part, place) for part in ("head", "relation", "tail"))
    if relation not in RELATIONS:
        raise place.field("relation").fault(f"one of {', '.join(RELATIONS)}", repr(relation)[:80])
    of_place = place.field("qualifiers")
    return Triple(
        head,
        relation,
        tail,
        Qualifiers(*(_name(qualifiers, part, of_place) for part in Qualifiers._fields)),
    )


def _name(record: Mapping[str, Any], part: str, place: Place) -> str:
    value = record.get(part)
    if not jsonl.is_text(value) or not value:
        got = "an empty one" if value == "" else jsonl.kind_of(value)
        raise place.field(part).fault("text", got)
    return value
