"""The triples and code blocks of one Python file, from its syntax tree.

Nothing is executed or imported, and each file is read separately: a name of another module is taken
from the import statement.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from .scopes import BUILTIN_CLASSES, Definition, Function, Scope, nodes_of
from .triples import Qualifiers, Triple

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


class Reader:
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
        self.read_scope(Scope(self.module, tree, None), tree)
        return Module(
            self.module, self.file, list(self.triples.values()), list(self.blocks.values())
        )

    def add(self, head: str, relation: str, tail: str) -> None:
        key = (head, relation, tail)
        if key not in self.triples:
            self.triples[key] = Triple(*key, self.qualifiers)

    def read_scope(self, scope: Scope, node: ast.Module | Definition) -> None:
        """Record the names that the scope binds, as uses may precede them; then read its body."""
        nodes = [inner for inner in nodes_of(node) if isinstance(inner, _READ)]
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

    def read_class(self, scope: Scope, node: ast.ClassDef) -> None:
        inner = self.enter(scope, "contains", node)
        for base in node.bases:
            for entity in self.types_in(scope, base):
                self.add(inner.name, "inherits_from", entity)
        self.read_scope(inner, node)

    def read_function(self, scope: Scope, node: Function) -> None:
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

    def enter(self, scope: Scope, relation: str, node: Definition) -> Scope:
        """Record a class or function with its code and decorators; return its scope."""
        inner = Scope(f"{scope.name}.{node.name}", node, scope)
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
        self, scope: Scope, owner: str, name: str, annotation: ast.expr | None = None
    ) -> None:
        self.add(owner, "declares", f"{owner}.{name}")
        if annotation is not None:
            for entity in self.types_in(scope, annotation):
                self.add(f"{owner}.{name}", "annotated_with", entity)

    def read_assignment(self, scope: Scope, node: ast.Assign | ast.AnnAssign) -> None:
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
        """Return the absolute name of the object that a `from … import …` imports."""
        parts = [] if node.module is None else [node.module]
        if node.level:
            around = self.module.split(".")
            parts = around[: max(0, len(around) - node.level + self.is_package)] + parts
        if alias.name != "*":
            parts.append(alias.name)
        return ".".join(parts) or self.module

    def read_call(self, scope: Scope, node: ast.Call) -> None:
        called = self.callee(scope, node.func)
        if called is not None:
            self.add(scope.name, *called)

    def callee(self, scope: Scope, function: ast.expr) -> tuple[str, str] | None:
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

    def read_return(self, scope: Scope, node: ast.Return) -> None:
        if scope.is_function and node.value is not None:
            entity = self.returned_type(scope, node.value)
            if entity is not None:
                self.add(scope.name, "returns", entity)

    def returned_type(self, scope: Scope, value: ast.expr) -> str | None:
        """Return what is known of an expression's value by its syntax: a type, callee or global."""
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

    def read_raise(self, scope: Scope, node: ast.Raise) -> None:
        entity = self.entity(scope, getattr(node.exc, "func", node.exc))
        if entity is not None and self.is_class(entity):
            self.add(scope.name, "raises", entity)

    def read_handler(self, scope: Scope, node: ast.ExceptHandler) -> None:
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        for exception in caught:
            entity = self.entity(scope, exception)
            if entity is not None:
                self.add(scope.name, "catches", entity)

    def entity(self, scope: Scope, node: ast.expr | None) -> str | None:
        """Return the entity that a (dotted) name stands for; None if it is unknown."""
        rest = []
        while isinstance(node, ast.Attribute):
            rest.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        root = scope.meaning(node.id)
        return None if root is None else ".".join([root, *reversed(rest)])

    def types_in(self, scope: Scope, annotation: ast.expr) -> list[str]:
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
        if entity in self.classes or entity in BUILTIN_CLASSES:
            return True
        last = entity.rpartition(".")[2].lstrip("_")
        return last[:1].isupper() and not last.isupper()
