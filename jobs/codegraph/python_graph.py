"""The knowledge graph of Python sources: triples (head, relation, tail) from their syntax trees.

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

A relation between the same two entities counts once per file. Nothing is executed or imported. Each
file is read alone: a name of another module is what the import statement says.
"""

from __future__ import annotations

import ast
import builtins
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.util import decode_source
from pathlib import Path
from typing import NamedTuple, TypeAlias

import orjson

from ..errors import SpecError

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
NOT_SOURCES = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Definition: TypeAlias = Function | ast.ClassDef


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


class Block(NamedTuple):
    """The code of an entity: of a module, a class or a function, with its indentation removed."""

    name: str
    text: str
    file: str


class Module(NamedTuple):
    """The triples and blocks of one file."""

    name: str
    file: str
    triples: list[Triple]
    blocks: list[Block]


def find_sources(folder: Path) -> list[Path]:
    """Return the Python files below a folder in a fixed order, without tests and hidden folders."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        # Pruned before descending: site-packages next to a standard library can be large.
        folders[:] = filter(_is_source, folders)
        found += [Path(place, name) for name in files if name.endswith(".py") and _is_source(name)]
    return sorted(found)


def _is_source(name: str) -> bool:
    return name not in NOT_SOURCES and not name.startswith(".")


def read_modules(
    sources: Iterable[Path], root: Path, *, on_skip: Callable[[Path, str], None] | None = None
) -> Iterator[Module]:
    """Yield the module of each file below `root`, in the given order.

    A file that cannot be read or parsed is skipped; `on_skip` gets its path and the reason.
    """
    for path in sources:
        try:
            module = _read(path, root)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # ValueError: wrong encoding, zero bytes. MemoryError: the parser raises it if nesting
            # is too deep.
            if on_skip is not None:
                on_skip(path, f"{type(error).__name__}: {error}")
        else:
            yield module


def build_triples(
    sources: Iterable[Path], root: Path, *, on_skip: Callable[[Path, str], None] | None = None
) -> Iterator[Triple]:
    """Yield the triples of all files, in the order of the files and of their lines."""
    for module in read_modules(sources, root, on_skip=on_skip):
        yield from module.triples


def write_triples(triples: Iterable[Triple], path: Path) -> None:
    """Write triples as JSONL: `{"head", "relation", "tail", "qualifiers": {…}}`."""
    with path.open("wb") as file:
        for triple in triples:
            record = triple._asdict() | {"qualifiers": triple.qualifiers._asdict()}
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


def read_triples(path: Path) -> Iterator[Triple]:
    """Yield the triples of a JSONL file. Raises SpecError that names the invalid line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = orjson.loads(line)
                values = [record["head"], record["relation"], record["tail"]]
                values += [record["qualifiers"][name] for name in Qualifiers._fields]
            except (ValueError, KeyError, TypeError):
                values = []
            if not values or not all(isinstance(value, str) and value for value in values):
                takes = "an object with head, relation, tail and qualifiers, all texts non-empty"
                raise SpecError(f"{path}, line {number}", f"must be {takes}, got {line[:60]!r}")
            if values[1] not in RELATIONS:
                takes = f"one of {', '.join(RELATIONS)}"
                raise SpecError(f"{path}, line {number}", f"must be {takes}, got {values[1]!r}")
            head, relation, tail, *qualifiers = values
            yield Triple(head, relation, tail, Qualifiers(*qualifiers))


def _read(path: Path, root: Path) -> Module:
    relative = path.relative_to(root)
    relative.as_posix().encode()  # raises ValueError: such a name could not be written to JSON
    source = decode_source(path.read_bytes())
    parts = list(relative.with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    if is_package:
        parts.pop()
    name = ".".join(parts or [root.resolve().name])
    reader = _Reader(name, relative.as_posix(), is_package, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes and the like in the user's code
        return reader.read(ast.parse(source))


class _Scope:
    """A module, class or function: its entity, and the meanings of names in it."""

    def __init__(self, name: str, node: ast.AST, outer: _Scope | None) -> None:
        self.name = name
        self.is_class = isinstance(node, ast.ClassDef)
        self.is_function = isinstance(node, Function)
        self.outer = outer
        # Name -> entity for imports, classes and functions; None for parameters.
        self.meanings: dict[str, str | None] = {}
        self.methods: set[str] = set()  # of a class

    def owner(self) -> _Scope | None:
        """The class that `self` is of."""
        scope: _Scope | None = self
        while scope is not None and not scope.is_class:
            scope = scope.outer
        return scope

    def meaning(self, name: str) -> str | None:
        """The entity that a name stands for; None for a variable or a parameter."""
        scope: _Scope | None = self
        while scope is not None:
            # As in Python: a function does not see the names of the class around it.
            if name in scope.meanings and (scope is self or not scope.is_class):
                return scope.meanings[name]
            scope = scope.outer
        return name if name in _BUILTINS else None


class _Reader:
    """Reads one syntax tree."""

    def __init__(self, module: str, file: str, is_package: bool, source: str) -> None:
        self.module = module
        self.file = file
        self.is_package = is_package
        self.source = source
        self.lines = source.split("\n")
        self.qualifiers = Qualifiers("python", file, module)
        self.triples: dict[tuple[str, str, str], Triple] = {}
        self.blocks: dict[str, Block] = {}
        self.classes: set[str] = set()

    def read(self, tree: ast.Module) -> Module:
        package = self.module.rpartition(".")[0]
        if package:
            self.add(package, "contains", self.module)
        self.blocks[self.module] = Block(self.module, self.source, self.file)
        self.read_scope(_Scope(self.module, tree, None), tree)
        return Module(
            self.module, self.file, list(self.triples.values()), list(self.blocks.values())
        )

    def add(self, head: str, relation: str, tail: str) -> None:
        key = (head, relation, tail)
        if key not in self.triples:
            self.triples[key] = Triple(*key, self.qualifiers)

    def read_scope(self, scope: _Scope, node: ast.Module | Definition) -> None:
        """Record the names that the scope binds, as uses may precede them; then read its body."""
        nodes = [inner for inner in _nodes_of(node) if isinstance(inner, _READ)]
        for inner in nodes:
            if isinstance(inner, Definition):
                entity = f"{scope.name}.{inner.name}"
                scope.meanings[inner.name] = entity
                if isinstance(inner, ast.ClassDef):
                    self.classes.add(entity)
                elif scope.is_class:
                    scope.methods.add(inner.name)
            elif isinstance(inner, ast.Import):
                for alias in inner.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    scope.meanings[bound] = alias.name if alias.asname else bound
            elif isinstance(inner, ast.ImportFrom):
                for alias in inner.names:
                    scope.meanings[alias.asname or alias.name] = self.imported(inner, alias)
        for inner in nodes:
            match inner:
                case ast.Call():
                    self.read_call(scope, inner)
                case ast.Assign() | ast.AnnAssign():
                    self.read_assignment(scope, inner)
                case ast.Return():
                    self.read_return(scope, inner)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.read_function(scope, inner)
                case ast.ClassDef():
                    self.read_class(scope, inner)
                case ast.Import(names=names):
                    for alias in names:
                        self.add(scope.name, "imports", alias.name)
                case ast.ImportFrom(names=names):
                    for alias in names:
                        self.add(scope.name, "imports", self.imported(inner, alias))
                case ast.Raise():
                    self.read_raise(scope, inner)
                case ast.ExceptHandler():
                    self.read_handler(scope, inner)

    def read_class(self, scope: _Scope, node: ast.ClassDef) -> None:
        inner = self.enter(scope, "contains", node)
        for base in node.bases:
            for entity in self.types_in(scope, base):
                self.add(inner.name, "inherits_from", entity)
        self.read_scope(inner, node)

    def read_function(self, scope: _Scope, node: Function) -> None:
        inner = self.enter(scope, "defines", node)
        parameters = node.args
        named = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
        for parameter in [*named, parameters.vararg, parameters.kwarg]:
            if parameter is None:
                continue
            inner.meanings[parameter.arg] = None
            if parameter.arg not in ("self", "cls"):
                self.declare(scope, inner.name, parameter.arg, parameter.annotation)
        if node.returns is not None:
            for entity in self.types_in(scope, node.returns):
                self.add(inner.name, "returns", entity)
        self.read_scope(inner, node)

    def enter(self, scope: _Scope, relation: str, node: Definition) -> _Scope:
        """Record a class or function with its code and decorators; return its scope."""
        inner = _Scope(f"{scope.name}.{node.name}", node, scope)
        self.add(scope.name, relation, inner.name)
        if inner.name not in self.blocks:  # the first of overloads and property setters counts
            first = min(line.lineno for line in (node, *node.decorator_list)) - 1
            lines = self.lines[first : node.end_lineno]
            indentation = lines[0][: node.col_offset]
            text = "\n".join(line.removeprefix(indentation) for line in lines)
            self.blocks[inner.name] = Block(inner.name, text, self.file)
        for decorator in node.decorator_list:
            entity = self.entity(scope, getattr(decorator, "func", decorator))
            if entity is not None:
                self.add(inner.name, "annotated_with", entity)
        return inner

    def declare(
        self, scope: _Scope, owner: str, name: str, annotation: ast.expr | None = None
    ) -> None:
        self.add(owner, "declares", f"{owner}.{name}")
        if annotation is not None:
            for entity in self.types_in(scope, annotation):
                self.add(f"{owner}.{name}", "annotated_with", entity)

    def read_assignment(self, scope: _Scope, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
        while targets:
            target, *targets = targets
            match target:
                case ast.Name(id=name) if not scope.is_function:
                    self.declare(scope, scope.name, name, annotation)
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    owner = scope.owner()
                    if owner is not None:
                        self.declare(scope, owner.name, name, annotation)
                case ast.Tuple(elts=elements) | ast.List(elts=elements):
                    targets = [*elements, *targets]

    def imported(self, node: ast.ImportFrom, alias: ast.alias) -> str:
        """Return the absolute name of what a `from … import …` imports."""
        parts = [] if node.module is None else [node.module]
        if node.level:
            around = self.module.split(".")
            parts = around[: max(0, len(around) - node.level + self.is_package)] + parts
        if alias.name != "*":
            parts.append(alias.name)
        return ".".join(parts) or self.module

    def read_call(self, scope: _Scope, node: ast.Call) -> None:
        called = self.callee(scope, node.func)
        if called is not None:
            self.add(scope.name, *called)

    def callee(self, scope: _Scope, function: ast.expr) -> tuple[str, str] | None:
        """Return the relation to the callee, and its entity; None if it is unknown."""
        if not isinstance(function, ast.Name | ast.Attribute):
            return None
        entity = self.entity(scope, function)
        if entity is not None:
            return ("instantiates" if self.is_class(entity) else "calls"), entity
        if isinstance(function, ast.Name):  # a variable with unknown value
            return None
        owner = scope.owner()
        if (
            owner is not None
            and isinstance(function.value, ast.Name)
            and function.value.id in ("self", "cls")
            and function.attr in owner.methods
        ):
            return "invokes", f"{owner.name}.{function.attr}"
        return "invokes", function.attr

    def read_return(self, scope: _Scope, node: ast.Return) -> None:
        if scope.is_function and node.value is not None:
            entity = self.returned_type(scope, node.value)
            if entity is not None:
                self.add(scope.name, "returns", entity)

    def returned_type(self, scope: _Scope, value: ast.expr) -> str | None:
        """Return what an expression's syntax tells of its value: a type, a callee or a global."""
        match value:
            case ast.Constant(value=None):
                return "None"
            case ast.Constant(value=constant):
                return type(constant).__name__
            case ast.Call(func=function):
                called = self.callee(scope, function)
                return None if called is None else called[1]
            case ast.Name(id="self"):
                owner = scope.owner()
                return None if owner is None else owner.name
        return _LITERALS.get(type(value)) or self.entity(scope, value)

    def read_raise(self, scope: _Scope, node: ast.Raise) -> None:
        entity = self.entity(scope, getattr(node.exc, "func", node.exc))
        if entity is not None and self.is_class(entity):
            self.add(scope.name, "raises", entity)

    def read_handler(self, scope: _Scope, node: ast.ExceptHandler) -> None:
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        for exception in caught:
            entity = self.entity(scope, exception)
            if entity is not None:
                self.add(scope.name, "catches", entity)

    def entity(self, scope: _Scope, node: ast.expr | None) -> str | None:
        """Return the entity that a (dotted) name stands for; None if it is unknown."""
        rest = []
        while isinstance(node, ast.Attribute):
            rest.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        root = scope.meaning(node.id)
        return None if root is None else ".".join([root, *reversed(rest)])

    def types_in(self, scope: _Scope, annotation: ast.expr) -> list[str]:
        """Return the entities of an annotation or of a base class."""
        match annotation:
            case ast.Constant(value=None):
                return ["None"]
            case ast.Constant(value=str(text)):
                try:
                    return self.types_in(scope, ast.parse(text.strip(), mode="eval").body)
                except (SyntaxError, ValueError):
                    return []
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.types_in(scope, left) + self.types_in(scope, right)
            case ast.Subscript(value=generic):
                return self.types_in(scope, generic)
        entity = self.entity(scope, annotation)
        return [] if entity is None else [entity]

    def is_class(self, entity: str) -> bool:
        if entity in self.classes or entity in _BUILTIN_CLASSES:
            return True
        last = entity.rpartition(".")[2].lstrip("_")
        return last[:1].isupper() and not last.isupper()


_BUILTINS = frozenset(dir(builtins))
_BUILTIN_CLASSES = frozenset(
    name for name in _BUILTINS if isinstance(getattr(builtins, name), type)
)
_LITERALS: dict[type[ast.AST], str] = {
    ast.List: "list",
    ast.ListComp: "list",
    ast.Dict: "dict",
    ast.DictComp: "dict",
    ast.Set: "set",
    ast.SetComp: "set",
    ast.Tuple: "tuple",
    ast.JoinedStr: "str",
    ast.Compare: "bool",
}
_READ = (ast.stmt, ast.Call, ast.ExceptHandler)
_LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.cmpop, ast.alias)


def _nodes_of(scope: ast.Module | Definition) -> Iterator[ast.AST]:
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
